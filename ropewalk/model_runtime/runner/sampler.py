"""Sample tokens from logits, for all rows of a step at once.

A row's random number depends on its request's seed and its number of generated tokens. No generator
is shared between rows, so a seed gives the same tokens in any batch.

Shapes: R = rows, V = vocabulary, A = a token and its alternatives.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.gpu_nodes import has_gpu_kernels
from ropewalk.model_runtime.request import MAX_LOGPROBS, SamplingParams, TokenLogprob
from ropewalk.model_runtime.runner.bad_words import BARRED, single_tokens
from ropewalk.model_runtime.runner.penalties import SeenTokens, penalise
from ropewalk.model_runtime.runner.ranked_draw import (
    column,
    cuts,
    draw_on_device,
    draw_on_host,
    pointed_at,
)
from ropewalk.model_runtime.transfer import on_device, wait_for

GREEDY_BELOW = 1e-5  # temperatures below this are 0: dividing by them overflows
_LOGPROB_ROWS = 64  # rows normalised at a time, to avoid a second copy of all logits
# Draws from rows with a cut tail: scaled logits, parameters and random numbers to tokens.
RankedDraw = Callable[[Tensor, Sequence[SamplingParams], Sequence[float]], Tensor]


@dataclass(slots=True, eq=False)
class SamplingRow:
    """The inputs for sampling one token, apart from its logits.

    A request keeps one for its whole life, so the constant inputs are built once.
    """

    params: SamplingParams
    num_generated: int  # tokens of the answer so far
    end_ids: frozenset[int]  # tokens that would end the answer
    seen: SeenTokens | None = None  # for rows with a penalty: the tokens it applies to
    # One bit per token, lowest first, as the grammar and the request have it; None: all may come.
    allowed: bytes | None = None
    barred: Sequence[int] = ()  # tokens that would complete a bad word of several tokens
    _bias: tuple[Any, Any] = field(init=False)  # token ids, values added to their logits
    _ban: tuple[Any, Any] = field(init=False)  # the same for end tokens before min_tokens

    def __post_init__(self) -> None:
        bias = [*self.params.logit_bias, *((token, BARRED) for token in single_tokens(self.params))]
        self._bias = _edits([token for token, _ in bias], [value for _, value in bias])
        self._ban = _edits(list(self.end_ids), [-np.inf] * len(self.end_ids))

    @property
    def changes_logits(self) -> bool:
        """Return whether the row's logits are not drawn from as they are."""
        return self.seen is not None or self.allowed is not None or bool(self.added())

    def added(self) -> Sequence[tuple[Any, Any]]:
        """Return non-empty (token ids int64, values float32) pairs to add to the logits."""
        may_end = self.num_generated >= self.params.min_tokens
        edits = (self._bias,) if may_end else (self._bias, self._ban)
        if self.barred:
            edits = (*edits, _edits(self.barred, [BARRED] * len(self.barred)))
        return [each for each in edits if len(each[0])]


def _edits(token_ids: Sequence[int], values: Sequence[float]) -> tuple[Any, Any]:
    return np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)


def uniform(seed: int, step: int) -> float:
    """Return the random number in [0, 1) of one token of a request."""
    digest = hashlib.blake2b(f"{seed},{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def sample_rows(
    logits_RV: Tensor, places: Sequence[int], rows: Sequence[SamplingRow]
) -> tuple[list[bool], list[int]]:
    """Return whether each row of the logits is finite, and a token id for each row in `places`.

    The token of a row that is not finite has no meaning.
    """
    chosen_RV = logits_RV
    if list(places) != list(range(len(logits_RV))):
        chosen_RV = rows_at(logits_RV, places)
    if logits_RV.device.type == "cpu":
        return finite_rows(logits_RV), sample(chosen_RV, rows)
    if not len(logits_RV):
        # A part of a prompt: the wait keeps steps from piling up, and their times correct.
        wait_for(logits_RV.device)
        return [], []
    return in_one_transfer(logits_RV, chosen_RV, rows)


def in_one_transfer(
    logits_RV: Tensor, chosen_RV: Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[bool], list[int]]:
    """Run `sample_rows` on a device with a single wait for it."""
    told: list[int] = sampled_on_device(logits_RV, chosen_RV, rows).tolist()
    return split_told(told, len(logits_RV))


def sampled_on_device(logits_RV: Tensor, chosen_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Run `sample_rows` without a wait for the device; int64, as `split_told` takes it."""
    if rows and has_gpu_kernels(logits_RV.device):
        return _sampled_by_kernels(logits_RV, chosen_RV, rows)
    return torch.cat((_are_finite(logits_RV), sampled(chosen_RV, rows, draw_on_device)))


def _are_finite(logits_RV: Tensor) -> Tensor:
    # One pass: a sum is finite if all terms are (only terms of about 1e33 would overflow).
    return logits_RV.sum(dim=-1).isfinite().long()


def _sampled_by_kernels(
    logits_RV: Tensor, chosen_RV: Tensor, rows: Sequence[SamplingRow]
) -> Tensor:
    """Run `sample_rows` by triton's kernels, which draw all rows without a sort."""
    from ropewalk.model_runtime.gpu.sampling.draw_ranked import (  # noqa: PLC0415  # optional
        draw_rows,
    )

    adjusted_RV = adjusted(chosen_RV, rows).contiguous()
    cuts_RC = draw_cuts(rows)
    cuts, scaled_RV = on_device(cuts_RC, logits_RV.device), torch.empty_like(adjusted_RV)
    told_A = draw_rows(adjusted_RV, cuts, scaled_RV, searches_of(cuts_RC))
    if adjusted_RV is logits_RV:
        return told_A
    return torch.cat((_are_finite(logits_RV), told_A[len(rows) :]))


def draw_cuts(rows: Sequence[SamplingRow]) -> np.ndarray:
    """Return what each row is drawn with, float64 [R, C], as draw_ranked.py's CUTS says."""
    return np.array([_cuts_of(row) for row in rows])


def _cuts_of(row: SamplingRow) -> tuple[float, float, float, float, float]:
    params = row.params
    if params.temperature < GREEDY_BELOW:
        return 0.0, 1.0, 0.0, 0.0, 0.0
    number = uniform(params.seed, row.num_generated)
    return params.top_k, params.top_p, params.min_p, number, params.temperature


def searches_of(cuts_RC: np.ndarray) -> tuple[bool, bool, bool]:
    """Return whether any row has top_k, has top_p, and is drawn."""
    top_k_R, top_p_R, _, _, temperature_R = cuts_RC.T
    return bool((top_k_R > 0).any()), bool((top_p_R < 1).any()), bool(temperature_R.any())


def split_told(told: list[int], num_rows: int) -> tuple[list[bool], list[int]]:
    """Return whether each row is finite, and the token ids."""
    return [one == 1 for one in told[:num_rows]], told[num_rows:]


def finite_rows(logits_RV: Tensor) -> list[bool]:
    """Return whether all logits of each row are finite; on a CPU."""
    if not logits_RV.shape[0]:
        return []
    # One pass. Torch's isfinite takes 18 times as long as its min and max, which take two.
    are_finite: list[bool] = np.isfinite(logits_RV.numpy()).all(axis=-1).tolist()
    return are_finite


def sample(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Sample one token id per row; on a CPU."""
    token_ids: list[int] = sampled(logits_RV, rows).tolist()
    return token_ids


def sampled(
    logits_RV: Tensor, rows: Sequence[SamplingRow], draw: RankedDraw = draw_on_host
) -> Tensor:
    """Sample one token id per row, int64 [R], without reading back from a device."""
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits_RV.device)
    logits_RV = adjusted(logits_RV, rows)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    if len(drawn) == len(rows):
        return _draw(logits_RV, rows, draw)
    token_R = _argmax(logits_RV)
    if drawn:
        chosen = rows_at(logits_RV, drawn), [rows[index] for index in drawn]
        token_R[_index(drawn, token_R.device)] = _draw(*chosen, draw)
    return token_R


def _argmax(logits_RV: Tensor) -> Tensor:
    """Return the first index of the max of each row."""
    if logits_RV.device.type == "cpu":
        # numpy's argmax takes a tenth of the time of torch's.
        return torch.from_numpy(logits_RV.numpy().argmax(axis=-1))
    return logits_RV.argmax(dim=-1)


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return on_device(np.array(places, dtype=np.int64), device)


def rows_at(rows_RV: Tensor, places: Sequence[int]) -> Tensor:
    """Return a copy of some rows, without waiting for the device."""
    return rows_RV[_index(places, rows_RV.device)]


def adjusted(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply bias, min_tokens and penalties, in vLLM's order, then the mask of allowed tokens.

    Returns a copy if any applies, else the same tensor.
    """
    edits = [(index, *edit) for index, row in enumerate(rows) for edit in row.added()]
    penalised = [
        (index, row.params, row.seen) for index, row in enumerate(rows) if row.seen is not None
    ]
    constrained = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not edits and not penalised and not constrained:
        return logits_RV
    logits_RV = logits_RV.clone()
    if edits:
        _add(logits_RV, edits)
    if penalised:
        penalise(logits_RV, penalised)
    if constrained:
        allowed_RV = _allowed(logits_RV, [rows[index].allowed or b"" for index in constrained])
        masked_RV = rows_at(logits_RV, constrained).masked_fill(~allowed_RV, -torch.inf)
        logits_RV[_index(constrained, logits_RV.device)] = masked_RV
    return logits_RV


def _add(logits_RV: Tensor, edits: Sequence[tuple[int, Any, Any]]) -> None:
    """Add to logits in place, at (row, token ids, values). Raises IndexError for an absent token.

    The host checks it: the same error of a kernel breaks a GPU for all requests.
    """
    rows = np.repeat([row for row, _, _ in edits], [len(ids) for _, ids, _ in edits])
    token_ids = np.concatenate([ids for _, ids, _ in edits])
    if token_ids.max() >= logits_RV.shape[-1]:
        raise IndexError(f"token {token_ids.max()} of {logits_RV.shape[-1]}")
    device = logits_RV.device
    where = on_device(rows, device), on_device(token_ids, device)
    values = on_device(np.concatenate([values for _, _, values in edits]), device)
    logits_RV.index_put_(where, values, accumulate=True)


def _allowed(logits_RV: Tensor, masks: Sequence[bytes]) -> Tensor:
    """Unpack one bit per token to [R, V]; tokens beyond a mask's end are not allowed."""
    vocabulary = logits_RV.shape[-1]
    num_bytes = -(-vocabulary // 8)
    packed = bytearray().join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    packed_RB = np.frombuffer(packed, np.uint8).reshape(len(masks), num_bytes)
    if logits_RV.device.type == "cpu":
        # numpy's unpackbits is ten times as fast as shifts in torch.
        allowed_RV = np.unpackbits(packed_RB, axis=1, bitorder="little", count=vocabulary)
        return torch.from_numpy(allowed_RV.view(np.bool_))
    return unpacked(on_device(packed_RB, logits_RV.device), vocabulary)


def unpacked(packed_RB: Tensor, vocabulary: int) -> Tensor:
    """Unpack the first bits of each row on its device, lowest first: uint8 [R, B] to bool [R, V].

    An eighth of the bytes is sent, and the host unpacks nothing.
    """
    place_8 = torch.arange(8, dtype=torch.uint8, device=packed_RB.device)
    is_set_RB8 = (packed_RB[:, :, None] >> place_8).bitwise_and_(1).view(torch.bool)
    return is_set_RB8.flatten(1)[:, :vocabulary]


def _draw(logits_RV: Tensor, rows: Sequence[SamplingRow], draw: RankedDraw) -> Tensor:
    """Apply the temperature, then sample one token per row from the cumulative probabilities.

    They are in the order of token ids, or of ranks if top_k, top_p or min_p cut the tail off.
    """
    device = logits_RV.device
    # Relative to the row max, so that a low temperature overflows only to minus infinity.
    scaled_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    scaled_RV /= column([row.params.temperature for row in rows], device)
    uniforms = [uniform(row.params.seed, row.num_generated) for row in rows]
    cut = [index for index, row in enumerate(rows) if cuts(row.params)]
    # Ranking a row takes longer than all the rest, so only rows with a cut are ranked.
    chosen_R = torch.empty(0)
    if len(cut) < len(rows):
        chosen_R = pointed_at(scaled_RV.softmax(dim=-1), uniforms)[:, 0]
        if not cut:
            return chosen_R
        scaled_RV = rows_at(scaled_RV, cut)
    params = [rows[index].params for index in cut]
    ranked_R = draw(scaled_RV, params, [uniforms[index] for index in cut])
    if len(cut) == len(rows):
        return ranked_R
    chosen_R[_index(cut, device)] = ranked_R
    return chosen_R


def logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Return the logprob of each row's token under the raw logits, with its top tokens."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        found += _logprobs(logits_RV[rows], token_ids[rows], num_top[rows])
    return found


def _log_softmax(logits_RV: Tensor) -> Tensor:
    """Return the logarithms of probabilities; a row's bits do not depend on its place.

    A GPU's kernel reads 16 bytes at once, and begins its sum where the first whole ones begin.
    """
    size = logits_RV.shape[-1]
    missing = 0 if logits_RV.device.type == "cpu" else -size % 4
    if missing:
        logits_RV = torch.nn.functional.pad(logits_RV, (0, missing), value=-torch.inf)
    return logits_RV.log_softmax(dim=-1)[:, :size]


def _logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    logprob_RV = _log_softmax(logits_RV)
    chosen_R1 = logprob_RV.gather(1, _index(token_ids, logits_RV.device)[:, None])
    top = logprob_RV.topk(min(MAX_LOGPROBS, logits_RV.shape[-1]), dim=-1)
    # One transfer: the float values are sent as int32 with the same bits.
    bits_RA = torch.cat((chosen_R1, top.values), dim=1).view(torch.int32)
    told_RA = torch.cat((bits_RA, top.indices.int()), dim=1).cpu()
    values_RA, ids_RA = told_RA.split_with_sizes([bits_RA.shape[1], top.indices.shape[1]], dim=1)
    values, top_ids = values_RA.contiguous().view(torch.float32).tolist(), ids_RA.tolist()
    return [
        TokenLogprob(
            token_id,
            values[row][0],
            tuple(zip(top_ids[row][:count], values[row][1 : 1 + count], strict=True)),
        )
        for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
