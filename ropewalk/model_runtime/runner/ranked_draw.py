"""Draw a token from a row whose tail top_k, top_p or min_p cuts off.

The tokens are ranked by their logit, and equal ones by their id. There are three ways.

- The host sorts the values only, which numpy does thirty times as fast as torch sorts values with
  their ids. It finds the rank that is drawn from values alone, and then the token of it. All
  decisions are those of a sort with ids, to the bit.
- A device without triton sorts some rows at a time. Probabilities are whole numbers there, whose
  sums do not depend on an order. So a row has the same draw in any batch.
- Triton's kernels decide likewise without a sort, for all rows (gpu/sampling/draw_ranked.py).

Shapes: R = rows, V = vocabulary, C = all tokens of a row, by rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.transfer import on_device

_SORTED_ROWS = 16  # rows that a device sorts at a time, to bound the memory
# The weight of the likeliest token on a device. The sum of 2**22 such weights fits into int64.
_UNIT = 2.0**40
_NO_LIMIT = torch.iinfo(torch.int64).max


def cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return one float32 number for each row, [R, 1]."""
    return on_device(np.array(numbers, dtype=np.float32)[:, None], device)


def _doubles(numbers: Sequence[float], device: torch.device) -> Tensor:
    return on_device(np.array(numbers, dtype=np.float64)[:, None], device)


def pointed_at(probability_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return the column at each row's random number in [0, 1), [R, 1]; its probability is not 0."""
    cumulated_RV = probability_RV.double().cumsum(dim=-1)
    target_R1 = _doubles(uniforms, probability_RV.device)
    total_R1 = cumulated_RV[:, -1:].contiguous()
    index_R1 = torch.searchsorted(cumulated_RV, target_R1 * total_R1, right=True)
    # The last column that adds to the sum, in case rounding gives a later one.
    last_R1 = torch.searchsorted(cumulated_RV, total_R1)
    # NaN gives an index beyond all columns; clamp it, or the device would fail.
    return torch.minimum(index_R1, last_R1).clamp(max=cumulated_RV.shape[-1] - 1)


def draw_on_host(
    scaled_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Apply top_k, top_p, min_p (the order of transformers), then draw a token per row, [R].

    `scaled_RV`: float32 logits on the CPU, after the temperature. `uniforms`: in [0, 1), by row.
    """
    # Row by row, because the numbers of one row stay in the processor's cache.
    drawn = map(_drawn_on_host, scaled_RV.numpy(), params, uniforms)
    return torch.tensor(list(drawn), dtype=torch.int64)


def _drawn_on_host(values_V: np.ndarray, params: SamplingParams, number: float) -> int:
    """Draw one row's token; the decisions about what is dropped are made in float32."""
    sorted_V = np.sort(values_V)[::-1].copy()
    probability_V = _probabilities(sorted_V, params.top_k)
    # Torch, too, sums in float64 and rounds each sum.
    before_V = np.cumsum(probability_V, dtype=np.float64).astype(np.float32) - probability_V
    kept_V = before_V < np.float32(params.top_p)
    if params.min_p > 0:
        kept_V &= probability_V >= probability_V[0] * np.float32(params.min_p)
    kept_V[0] = True
    end = len(kept_V) - int(kept_V[::-1].argmax())
    cumulated_V = np.cumsum(np.where(kept_V[:end], probability_V[:end], 0.0), dtype=np.float64)
    total = cumulated_V[-1]
    rank = np.searchsorted(cumulated_V, number * total, side="right")
    # The last rank that adds to the sum, in case rounding gives a later one.
    return _token_at(values_V, sorted_V, int(min(rank, np.searchsorted(cumulated_V, total))))


def _probabilities(sorted_V: np.ndarray, top_k: int) -> Any:
    """Return the probability of each rank, float32 [V]; 0 beyond the first `top_k`."""
    if top_k:
        # Ties with the k-th token stay, as in the reference.
        kth = sorted_V[min(top_k, len(sorted_V)) - 1]
        sorted_V = np.where(sorted_V < kth, np.float32(-np.inf), sorted_V)
    return torch.from_numpy(sorted_V).softmax(dim=-1).numpy()


def _token_at(values_V: np.ndarray, sorted_V: np.ndarray, rank: int) -> int:
    """Return the token of a rank. Equal values rank by their ids."""
    value = sorted_V[rank]
    (ids,) = np.nonzero(values_V == value)
    if len(ids) <= 1:
        return int(ids[0]) if len(ids) else 0  # none is equal to NaN; such a row has no answer
    first = np.searchsorted(-sorted_V, -value)
    return int(ids[rank - first])


def draw_on_device(
    scaled_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Do the same on a device, without waiting for it."""
    drawn = []
    for start in range(0, len(params), _SORTED_ROWS):
        part = slice(start, start + _SORTED_ROWS)
        drawn.append(_drawn_on_device(scaled_RV[part], params[part], uniforms[part]))
    return torch.cat(drawn)


def _drawn_on_device(
    scaled_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    value_RC, id_RC = scaled_RV.sort(dim=-1, descending=True, stable=True)
    # A vectorised exp may differ from a scalar one, so weights are computed before the sort.
    weight_RC = scaled_RV.exp().mul_(_UNIT).long().gather(1, id_RC)
    cumulated_RC = _kept_weights(value_RC, weight_RC, params).cumsum(dim=-1)
    total_R1 = cumulated_RC[:, -1:].contiguous()
    drawn_R1 = (_doubles(uniforms, scaled_RV.device) * total_R1.double()).long()
    target_R1 = torch.minimum(drawn_R1, total_R1 - 1)  # the product may be rounded up
    rank_R1 = torch.searchsorted(cumulated_RC, target_R1, right=True)
    # NaN makes nonsense of the sums; clamp the index, or the device would fail.
    return id_RC.gather(1, rank_R1.clamp(max=id_RC.shape[-1] - 1))[:, 0]


def _kept_weights(value_RC: Tensor, weight_RC: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights, 0 for tokens that are dropped."""
    device, num = weight_RC.device, weight_RC.shape[-1]
    if any(each.top_k for each in params):
        last_R1 = on_device(
            np.array([[min(each.top_k or num, num) - 1] for each in params]), device
        )
        # Ties with the k-th token stay.
        weight_RC = weight_RC.masked_fill(value_RC < value_RC.gather(1, last_R1), 0)
    total_R1 = weight_RC.sum(-1, keepdim=True)
    before_RC = weight_RC.cumsum(dim=-1) - weight_RC
    top_p_R1 = _doubles([each.top_p for each in params], device)
    reached_R1 = (total_R1.double() * top_p_R1).ceil().long()
    reached_R1 = reached_R1.masked_fill(top_p_R1 >= 1, _NO_LIMIT)
    min_p_R1 = _doubles([each.min_p for each in params], device)
    least_R1 = (weight_RC[:, :1].double() * min_p_R1).ceil().long()
    dropped_RC = (before_RC >= reached_R1) | (weight_RC < least_R1)
    dropped_RC[:, 0] = False
    return weight_RC.masked_fill(dropped_RC, 0)
