"""Logits to tokens, for all rows of a step at once.

A row's random number comes from its request's seed and the count of tokens it has generated, not
from a generator that rows share: a seed gives the same tokens in any batch.

Shapes: R = rows, V = vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runtime.request import SamplingParams, TokenLogprob

MAX_LOGPROBS = 20  # alternatives per token; always computed, so that ties fall the same way
GREEDY_BELOW = 1e-5  # temperatures below this are 0: dividing by them overflows
_LOGPROB_ROWS = 64  # rows normalised at a time, so that no second copy of all logits exists


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the choice of one token depends on, beside its logits."""

    params: SamplingParams
    num_generated: int  # tokens of the answer so far
    end_ids: frozenset[int]  # tokens that would end the answer
    # Only for rows with a penalty: what it is taken of.
    generated_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()  # each once is enough
    # Where the answer has a grammar: a bit a token, the lowest first; None: all may follow.
    allowed: bytes | None = None


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of one request's one token."""
    digest = hashlib.blake2b(f"{seed},{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def sample(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token id a row."""
    logits_RV = adjusted(logits_RV, rows)
    chosen_R = logits_RV.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    if drawn:
        chosen_R[drawn] = _draw(logits_RV[drawn], [rows[index] for index in drawn])
    token_ids: list[int] = chosen_R.tolist()
    return token_ids


def adjusted(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after bias, min_tokens and penalties, in vLLM's order, then the grammar's mask.

    A copy where any applies.
    """
    biased = _bias(rows)
    penalised = [index for index, row in enumerate(rows) if has_penalty(row.params)]
    constrained = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not biased and not penalised and not constrained:
        return logits_RV
    logits_RV = logits_RV.clone()
    if biased:
        at_rows, at_tokens, values = zip(*biased, strict=True)
        device = logits_RV.device
        where = torch.tensor(at_rows, device=device), torch.tensor(at_tokens, device=device)
        logits_RV.index_put_(where, torch.tensor(values, device=device), accumulate=True)
    if penalised:
        logits_RV[penalised] = _penalised(
            logits_RV[penalised], [rows[index] for index in penalised]
        )
    if constrained:
        allowed_RV = _allowed(logits_RV, [rows[index].allowed or b"" for index in constrained])
        logits_RV[constrained] = logits_RV[constrained].masked_fill(~allowed_RV, -torch.inf)
    return logits_RV


def _bias(rows: Sequence[SamplingRow]) -> list[tuple[int, int, float]]:
    """(row, token, what is added to its logit)."""
    found = []
    for index, row in enumerate(rows):
        found += [(index, token, value) for token, value in row.params.logit_bias]
        if row.num_generated < row.params.min_tokens:
            found += [(index, token, -torch.inf) for token in row.end_ids]
    return found


def _allowed(logits_RV: Tensor, masks: Sequence[bytes]) -> Tensor:
    """A bit a token -> [R, V]; tokens behind a mask's end are not allowed."""
    vocabulary = logits_RV.shape[-1]
    num_bytes = -(-vocabulary // 8)
    packed = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    packed_RB = np.frombuffer(packed, np.uint8).reshape(len(masks), num_bytes)
    # numpy's is ten times as fast as shifting in torch.
    allowed_RV = np.unpackbits(packed_RB, axis=1, bitorder="little", count=vocabulary)
    return torch.from_numpy(allowed_RV).to(logits_RV.device).bool()


def has_penalty(params: SamplingParams) -> bool:
    """Whether a request's tokens so far change its logits."""
    return params.repetition_penalty != 1 or bool(
        params.presence_penalty or params.frequency_penalty
    )


def _penalised(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Repetition as transformers (prompt and answer), presence and frequency as OpenAI (answer)."""
    generated_RV = _counts(logits_RV, [row.generated_ids for row in rows])
    prompt_RV = _counts(logits_RV, [row.prompt_ids for row in rows])
    params = [row.params for row in rows]
    repetition_R1 = _column(logits_RV, [each.repetition_penalty for each in params])
    frequency_R1 = _column(logits_RV, [each.frequency_penalty for each in params])
    presence_R1 = _column(logits_RV, [each.presence_penalty for each in params])
    pushed_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(generated_RV + prompt_RV > 0, pushed_RV, logits_RV)
    return logits_RV - frequency_R1 * generated_RV - presence_R1 * (generated_RV > 0)


def _counts(logits_RV: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """How often each token stands in each row's list, [R, V]."""
    vocabulary = logits_RV.shape[-1]
    counted = [
        torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocabulary)
        for ids in token_ids
    ]
    return torch.stack(counted).to(logits_RV.device, logits_RV.dtype)


def _column(logits_RV: Tensor, numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=logits_RV.device)[:, None]


def _draw(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Temperature, top_k, top_p, min_p (the order of transformers), then inverse CDF."""
    params = [row.params for row in rows]
    vocabulary = logits_RV.shape[-1]
    # Relative to the likeliest, so that a low temperature overflows towards minus infinity only.
    relative_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    scaled_RV = relative_RV / _column(logits_RV, [each.temperature for each in params])
    sorted_RV, token_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    top_k_R1 = _column(logits_RV, [each.top_k or vocabulary for each in params])
    rank_V = torch.arange(vocabulary, device=logits_RV.device)
    # Ties with the k-th stay, as in the reference.
    kth_R1 = sorted_RV.gather(1, (top_k_R1.clamp(max=vocabulary) - 1).long())
    sorted_RV = sorted_RV.masked_fill(sorted_RV < kth_R1, -torch.inf)
    probability_RV = sorted_RV.softmax(dim=-1)
    before_RV = probability_RV.cumsum(dim=-1) - probability_RV
    dropped_RV = before_RV >= _column(logits_RV, [each.top_p for each in params])
    least_R1 = probability_RV[:, :1] * _column(logits_RV, [each.min_p for each in params])
    dropped_RV = (dropped_RV | (probability_RV < least_R1)) & (rank_V > 0)
    probability_RV = probability_RV.masked_fill(dropped_RV, 0.0)
    cumulated_RV = probability_RV.double().cumsum(dim=-1)
    draws = [uniform(row.params.seed, row.num_generated) for row in rows]
    target_R1 = torch.tensor(draws, dtype=torch.float64, device=logits_RV.device)[:, None]
    target_R1 = target_R1 * cumulated_RV[:, -1:]
    index_R1 = torch.searchsorted(cumulated_RV, target_R1, right=True)
    # The last number that has any probability, should rounding point behind it.
    last_R1 = ((probability_RV > 0).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
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
