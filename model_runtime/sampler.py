"""Logits to tokens, for all rows of a step at once.

A row's random number comes from its request's seed and the count of tokens it has generated, not
from a generator that rows share: a seed gives the same tokens in any batch.

Shapes: R = rows, V = vocabulary, k = alternatives reported.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from model_runtime.request import SamplingParams, TokenLogprob

MAX_LOGPROBS = 20  # alternatives per token; always computed, so that ties fall the same way
_LOGPROB_ROWS = 64  # rows normalised at a time, so that no second copy of all logits exists


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of one request's one token."""
    digest = hashlib.blake2b(f"{seed},{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def sample(logits_RV: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """One token id a row; `steps` counts the tokens each request has already generated."""
    chosen_R = logits_RV.argmax(dim=-1)
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    if drawn:
        chosen_R[drawn] = _draw(
            logits_RV[drawn], [params[row] for row in drawn], [steps[row] for row in drawn]
        )
    token_ids: list[int] = chosen_R.tolist()
    return token_ids


def _draw(logits_RV: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    """Temperature, then top_k, then top_p (as transformers and vLLM), then inverse CDF."""

    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=logits_RV.device)[:, None]

    vocabulary = logits_RV.shape[-1]
    scaled_RV = logits_RV / column([each.temperature for each in params])
    sorted_RV, token_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    top_k_R1 = column([each.top_k or vocabulary for each in params])
    rank_V = torch.arange(vocabulary, device=logits_RV.device)
    # Ties with the k-th stay, as in the reference.
    kth_R1 = sorted_RV.gather(1, (top_k_R1.clamp(max=vocabulary) - 1).long())
    sorted_RV = sorted_RV.masked_fill(sorted_RV < kth_R1, -torch.inf)
    probability_RV = sorted_RV.softmax(dim=-1)
    before_RV = probability_RV.cumsum(dim=-1) - probability_RV
    dropped_RV = (before_RV >= column([each.top_p for each in params])) & (rank_V > 0)
    probability_RV = probability_RV.masked_fill(dropped_RV, 0.0)
    cumulated_RV = probability_RV.double().cumsum(dim=-1)
    draws = [uniform(each.seed, step) for each, step in zip(params, steps, strict=True)]
    target_R1 = torch.tensor(draws, dtype=torch.float64, device=logits_RV.device)[:, None]
    target_R1 = target_R1 * cumulated_RV[:, -1:]
    index_R1 = torch.searchsorted(cumulated_RV, target_R1, right=True)
    # The last number that has any probability, should rounding point behind it.
    last_R1 = (probability_RV > 0).sum(dim=-1, keepdim=True) - 1
    return token_RV.gather(1, torch.minimum(index_R1, last_R1))[:, 0]


def logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Each row's token under the raw logits, with that row's number of likeliest tokens."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        found += _logprobs(logits_RV[rows], token_ids[rows], num_top[rows])
    return found


def _logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    logprob_RV = logits_RV.log_softmax(dim=-1)
    ids_R1 = torch.tensor(token_ids, device=logits_RV.device)[:, None]
    chosen = logprob_RV.gather(1, ids_R1)[:, 0].tolist()
    top = logprob_RV.topk(min(MAX_LOGPROBS, logits_RV.shape[-1]), dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(
            token_id,
            chosen[row],
            tuple(zip(top_ids[row][:count], top_values[row][:count], strict=True)),
        )
        for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
