"""Draw a token from a row whose tail top_k, top_p or min_p cuts off.

The tokens are ranked by their logit, and equal ones by their id. There are two ways, for the host
and for a device. Both find the rank that is drawn from values alone, and then the token of it.

- The host sorts the values only, which numpy does thirty times as fast as torch sorts values with
  their ids. All decisions are those of a sort with ids, to the bit.
- A device looks at the best `most` values of each row. It says so if the nucleus does not end among
  them, and the row is then drawn again with all values. Probabilities are whole numbers there,
  whose sums do not depend on an order. So both draws decide alike, and so does any batch.

Shapes: R = rows, V = vocabulary, C = candidates (the best values of a row, in order).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.transfer import on_device

NOT_FOUND = -1  # the token of a row whose candidates do not suffice
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


class _Candidates(NamedTuple):
    """The best tokens of each row."""

    value_RC: Tensor  # float32, descending
    id_RC: Tensor  # int64; ordered among equal values only if `are_all`
    weight_RC: Tensor  # int64, the probability times a constant of the row
    total_R1: Tensor  # int64, the sum of all weights of the row
    are_all: bool  # whether there are no other tokens


def draw_on_device(
    scaled_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], most: int
) -> Tensor:
    """Do the same among the best `most` tokens of each row, without waiting for the device.

    Returns NOT_FOUND for a row that needs more of them; it never does if `most` is V.
    """
    found = _best(scaled_RV, most)
    kept_RC, is_short_R1 = _kept_weights(found, params)
    cumulated_RC = kept_RC.cumsum(dim=-1)
    total_R1 = cumulated_RC[:, -1:].contiguous()
    drawn_R1 = (_doubles(uniforms, scaled_RV.device) * total_R1.double()).long()
    target_R1 = torch.minimum(drawn_R1, total_R1 - 1)  # the product may be rounded up
    rank_R1 = torch.searchsorted(cumulated_RC, target_R1, right=True)
    # NaN makes nonsense of the sums; clamp the index, or the device would fail.
    rank_R1 = rank_R1.clamp(max=kept_RC.shape[-1] - 1)
    if found.are_all:
        return found.id_RC.gather(1, rank_R1)[:, 0]
    value_R1 = found.value_RC.gather(1, rank_R1)
    token_R1 = _ranked_id(found, rank_R1, value_R1, scaled_RV.shape[-1])
    # Others with the last value may have smaller ids than the candidates.
    is_short_R1 |= value_R1 == found.value_RC[:, -1:]
    return token_R1.masked_fill(is_short_R1, NOT_FOUND)[:, 0]


def _best(scaled_RV: Tensor, most: int) -> _Candidates:
    weight_RV = scaled_RV.exp().mul_(_UNIT).long()
    are_all = most >= scaled_RV.shape[-1]
    if are_all:
        value_RC, id_RC = scaled_RV.sort(dim=-1, descending=True, stable=True)
    else:
        value_RC, id_RC = scaled_RV.topk(most, dim=-1)
    # A vectorised exp may differ from a scalar one, so weights are computed once.
    weight_RC = weight_RV.gather(1, id_RC)
    return _Candidates(value_RC, id_RC, weight_RC, weight_RV.sum(-1, keepdim=True), are_all)


def _kept_weights(found: _Candidates, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return weights, 0 for tokens that are dropped, and whether tokens beyond them may stay."""
    weight_RC, total_R1 = found.weight_RC, found.total_R1
    device, num = weight_RC.device, weight_RC.shape[-1]
    is_short_R1 = torch.zeros_like(total_R1, dtype=torch.bool)
    if any(each.top_k for each in params):
        last_R1 = on_device(
            np.array([[min(each.top_k or num, num) - 1] for each in params]), device
        )
        has_k_R1 = on_device(np.array([[each.top_k > 0] for each in params]), device)
        # Ties with the k-th token stay.
        is_in_RC = found.value_RC >= found.value_RC.gather(1, last_R1)
        weight_RC = weight_RC.masked_fill(~is_in_RC & has_k_R1, 0)
        # If the last candidate is one of the k, then others may be, and their sum is not known.
        is_short_R1 = has_k_R1 & (weight_RC[:, -1:] > 0)
        total_R1 = torch.where(has_k_R1, weight_RC.sum(-1, keepdim=True), total_R1)
    before_RC = weight_RC.cumsum(dim=-1) - weight_RC
    top_p_R1 = _doubles([each.top_p for each in params], device)
    reached_R1 = (total_R1.double() * top_p_R1).ceil().long()
    reached_R1 = reached_R1.masked_fill(top_p_R1 >= 1, _NO_LIMIT)
    min_p_R1 = _doubles([each.min_p for each in params], device)
    least_R1 = (weight_RC[:, :1].double() * min_p_R1).ceil().long()
    dropped_RC = (before_RC >= reached_R1) | (weight_RC < least_R1)
    dropped_RC[:, 0] = False
    weight_RC = weight_RC.masked_fill(dropped_RC, 0)
    return weight_RC, is_short_R1 | (weight_RC[:, -1:] > 0)


def _ranked_id(found: _Candidates, rank_R1: Tensor, value_R1: Tensor, vocabulary: int) -> Tensor:
    """Return the ids at these ranks, [R, 1], if no other token has the last candidate's value."""
    first_R1 = (found.value_RC > value_R1).sum(dim=-1, keepdim=True)
    is_equal_RC = found.value_RC == value_R1
    # topk gives equal values in no particular order.
    id_RC = found.id_RC.masked_fill(~is_equal_RC, vocabulary).sort(dim=-1).values
    # NaN is equal to nothing, so its id would be `vocabulary`.
    return id_RC.gather(1, rank_R1 - first_R1).clamp(max=vocabulary - 1)
