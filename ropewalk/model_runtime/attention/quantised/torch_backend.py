"""Quantised pages in plain torch and numpy: the reference, where no kernel compiles.

A read splits each sequence at the ends of pages. The tokens of one page then read earlier pages,
widened, and their own page as it was written, with the read of `attention/torch_backend.py`.

Shapes: N = pages, X = exact pages, K = key heads, R = bytes of a record, E = numbers of an exact
page of one head, T = query tokens, H = query heads, D = key dimensions, V = value dimensions, O =
offsets in a page, P = parts of a row, L = numbers of a row or part. Rows C are channels of keys, or
groups of values.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place, Span, build_batch
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.quantised.own_pages import OwnPages
from ropewalk.model_runtime.attention.quantised.page_format import key_parts
from ropewalk.model_runtime.attention.torch_backend import TorchAttention

_LEAST_STEP, _MOST = np.float32(2.0**-14), np.float32(65504.0)  # the normal numbers of float16
_FOUR_BITS = 4


class QuantisedTorchAttention(TorchAttention):
    """One step's reads and writes of a cache of quantised pages, on a CPU."""

    def __init__(self, batch: Batch) -> None:
        """Prepare a step. The batch has the own pages of its tokens."""
        super().__init__(batch)
        assert batch.own_pages is not None, "a batch for a cache that quantises nothing"
        self._own: OwnPages = batch.own_pages
        self._is_tail_T, self._place_T = self._own.places()

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,  # noqa: ARG002  # these pages hold their own
    ) -> None:
        """Write keys and values; the first two tensors are a layer's quantised and tail pages."""
        records_NKR, tail_XKE = keys_NKDO, values_NKOV
        staged_XKE = self._own.layer(*tail_XKE.shape[1:])
        for tail_page, stage in self._own.copies_C2:
            staged_XKE[stage] = tail_XKE[tail_page]
        is_tail_T, place_T, offset_T = self._is_tail_T, self._place_T, self._batch.offset_T
        dim = key_TKD.shape[2]
        for exact_XKE, rows_T in ((tail_XKE, is_tail_T), (staged_XKE, ~is_tail_T)):
            keys_XKDO, values_XKOV = self._exact(exact_XKE, dim)
            at = place_T[rows_T], offset_T[rows_T]
            keys_XKDO[at[0], :, :, at[1]] = key_TKD[rows_T].to(exact_XKE.dtype)
            values_XKOV[at[0], :, at[1]] = value_TKV[rows_T].to(exact_XKE.dtype)
        filled = torch.nonzero(offset_T == self._own.store.page_size - 1).flatten().tolist()
        for token in filled:
            exact_XKE = tail_XKE if is_tail_T[token] else staged_XKE
            sides = self._own.store.sides(len(records_NKR[0]), dim, value_TKV.shape[2])
            for head, numbers_E in enumerate(exact_XKE[place_T[token]].float().numpy()):
                content = torch.frombuffer(bytearray(record(numbers_E, sides)), dtype=torch.uint8)
                records_NKR[self._batch.page_T[token], head, : len(content)] = content

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, float32 [T, H, V] over all sequences' tokens."""
        places = enumerate(self._batch.places_S)
        return torch.cat([self._sequence(read, index, place) for index, place in places])

    def _exact(self, exact_XKE: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return the keys [X, K, D, O] and values [X, K, O, V] of exact pages, as views."""
        page_size, heads = self._own.store.page_size, exact_XKE.shape[:2]
        keys_at, value_dim = dim * page_size, exact_XKE.shape[2] // page_size - dim
        return (
            exact_XKE[:, :, :keys_at].view(*heads, dim, page_size),
            exact_XKE[:, :, keys_at:].view(*heads, page_size, value_dim),
        )

    def _sequence(self, read: LayerRead, index: int, place: Place) -> Tensor:
        records_NKR, tail_XKE = read.keys_NKDO, read.values_NKOV
        page_size, dim = self._own.store.page_size, read.query_THD.shape[2]
        end = place.first_position + place.num_tokens
        table_N = self._batch.page_table_SN[index, : (end - 1) // page_size].long()
        value_dim = tail_XKE.shape[2] // page_size - dim
        sides = self._own.store.sides(records_NKR.shape[1], dim, value_dim)
        keys_NKDO, values_NKOV = widened(records_NKR[table_N], sides)
        staged_XKE, found, first = self._own.layer(*tail_XKE.shape[1:]), [], place.first_position
        while first < end:
            page = first // page_size
            after = min(end, (page + 1) * page_size)
            token = place.begin + first - place.first_position
            pages_XKE = tail_XKE if self._is_tail_T[token] else staged_XKE
            exact_XKE = pages_XKE[self._place_T[token]][None]
            own_keys, own_values = self._exact(exact_XKE.float(), dim)
            span = Span([0] * (after - first), first, range(page + 1), place.table_id, range(0))
            part = replace(
                read,
                query_THD=read.query_THD[token : token + after - first],
                keys_NKDO=torch.cat((keys_NKDO[:page], own_keys)),
                values_NKOV=torch.cat((values_NKOV[:page], own_values)),
            )
            batch = build_batch([span], page_size, read.query_THD.device)
            found.append(TorchAttention(batch).read(part))
            first = after
        return torch.cat(found)


def record(numbers_E: NDArray[np.float32], sides: tuple[int, ...]) -> bytes:
    """Return the record of one page and head, as `cpu_kernels/quantised/quantise.py` makes it."""
    _, dim, value_dim, page_size, key_bits, value_bits, groups = sides
    keys_CL = numbers_E[: dim * page_size].reshape(dim, page_size)
    values_CL = numbers_E[dim * page_size :].reshape(-1, value_dim // groups)
    keys = _quantised(keys_CL, key_bits, key_parts(key_bits))
    values = _quantised(values_CL, value_bits, 1)
    return b"".join((keys[0], values[0], *keys[1:], *values[1:]))


def _quantised(
    rows_CL: NDArray[np.float32], bits: int, num_parts: int
) -> tuple[bytes, bytes, bytes]:
    """Return the codes of rows, and the lowest numbers and steps of all their parts."""
    most, num_rows = np.float32(2**bits - 1), len(rows_CL)
    rows_CL = np.concatenate(np.split(rows_CL, num_parts, 1))  # all first parts, then the next
    is_finite_C = np.asarray(np.isfinite(rows_CL).all(1))
    rows_CL = np.where(is_finite_C[:, None], rows_CL, np.float32(0))
    exact_C = rows_CL.min(1).clip(-_MOST, _MOST)
    low_C = exact_C.astype(np.float16)
    with np.errstate(over="ignore"):  # below the lowest float16, which is never too high
        lower_C = np.nextafter(low_C, np.float16(-np.inf))
    low_C = np.where(low_C.astype(np.float32) > exact_C, lower_C, low_C)
    low_C1 = low_C.astype(np.float32)[:, None]
    steps_C = ((rows_CL.max(1) - low_C1[:, 0]) / most).clip(_LEAST_STEP, _MOST).astype(np.float16)
    inverse_C1 = (np.float32(1) / steps_C.astype(np.float32))[:, None]
    code_CL = np.rint((rows_CL - low_C1) * inverse_C1).clip(0, most).astype(np.uint8)
    code_CL = np.concatenate(np.split(code_CL, len(code_CL) // num_rows), 1)
    if bits == _FOUR_BITS:
        half = code_CL.shape[1] // 2
        code_CL = code_CL[:, :half] | (code_CL[:, half:] << 4)
    steps_C[~is_finite_C] = np.nan
    return code_CL.tobytes(), low_C.tobytes(), steps_C.tobytes()


def widened(records_NKR: Tensor, sides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys [N, K, D, O] and values [N, K, O, V] of quantised pages, float32."""
    _, dim, value_dim, page_size, key_bits, value_bits, groups = sides
    rows = (
        (dim, page_size, key_bits, key_parts(key_bits)),
        (page_size * groups, value_dim // groups, value_bits, 1),
    )
    at = sum(num * length * bits // 8 for num, length, bits, _ in rows)
    found: list[Tensor] = []
    codes_at, places = 0, records_NKR.shape[:2]
    for num, length, bits, num_parts in rows:
        size = num * length * bits // 8
        code_NKCL = records_NKR[..., codes_at : codes_at + size].view(*places, num, size // num)
        if bits == _FOUR_BITS:
            code_NKCL = torch.cat((code_NKCL & 15, code_NKCL >> 4), -1)
        after = at + 4 * num * num_parts
        halves = records_NKR[..., at:after].contiguous().view(torch.float16).double()
        low_NKCP1, step_NKCP1 = halves.view(*places, 2, num_parts, num).mT[..., None].unbind(2)
        code_NKCPL = code_NKCL.reshape(*places, num, num_parts, length // num_parts).double()
        exact_NKCL = (code_NKCPL * step_NKCP1 + low_NKCP1).flatten(-2)
        found.append(exact_NKCL.float())  # rounded once
        codes_at, at = codes_at + size, after
    keys_NKDO, values_NKCL = found
    return keys_NKDO, values_NKCL.view(*places, page_size, value_dim)
