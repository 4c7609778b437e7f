"""The compiled kernel: attention over pages of unrotated keys, on a CPU.

A row is one query token under one query head. Rows are independent of each other: a row walks its
own pages in ascending order and reduces page by page, so its bits do not depend on the batch, the
chunking, or the number of threads (design, section 5). `attention_torch` is the reference.

Rotation costs little here. A query is turned to its absolute position once, and back by a page's
start once a page; keys are turned by the small in-page table once for a tile of queries.

Shapes: T = flat query tokens, H = query heads, K = key heads, D = key dimensions, V = value
dimensions, S = sequences or table slots, N = pages, O = offsets in a page, P = rotated pairs,
W = work items, R = rows of a tile.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import overload

TILE = 16  # query tokens that share one rotation of a page's keys

Function = TypeVar("Function", bound=Callable[..., Any])


def _jit(function: Function) -> Function:
    """Compile; products and sums may fuse, but sums keep their order and NaN stays NaN."""
    compiled: Function = numba.njit(
        nogil=True, cache=True, fastmath={"contract"}, error_model="numpy"
    )(function)
    return compiled


def _widen(row: Any, out: Any) -> None:
    """Copy a cached vector to float32; replaced at compile time by the cache's own type."""
    raise NotImplementedError


@overload(_widen)  # type: ignore[untyped-decorator]
def _overload_widen(row: Any, out: Any) -> Callable[..., None]:  # noqa: ARG001
    if row.dtype == types.uint16:

        def widen_bf16(row: Any, out: Any) -> None:
            bits = out.view(np.uint32)
            for d in range(row.shape[0]):
                bits[d] = np.uint32(row[d]) << np.uint32(16)

        return widen_bf16

    def copy_float32(row: Any, out: Any) -> None:
        for d in range(row.shape[0]):
            out[d] = row[d]

    return copy_float32


@_jit
def _turn_query(
    query_D: Any, position: int, page_size: int, slot: int,
    start_cos: Any, start_sin: Any, offset_cos: Any, offset_sin: Any,
    rotary_scale: Any, scale: Any, out_D: Any,
) -> None:  # fmt: skip
    """Turn a query to its absolute position (addition formula) and scale it."""
    page, offset = position // page_size, position % page_size
    pairs = start_cos.shape[2]
    for p in range(pairs):
        a, b = start_cos[slot, page, p], start_sin[slot, page, p]
        c, d = offset_cos[slot, offset, p], offset_sin[slot, offset, p]
        cos, sin = a * c - b * d, b * c + a * d
        first, second = query_D[p], query_D[p + pairs]
        out_D[p] = (first * cos - second * sin) * rotary_scale
        out_D[p + pairs] = (second * cos + first * sin) * rotary_scale
    for d in range(2 * pairs, query_D.shape[0]):
        out_D[d] = query_D[d] * scale


@_jit
def _turn_back(query_D: Any, cos_P: Any, sin_P: Any, out_D: Any) -> None:
    """Turn a query back by a page's start, so that in-page angles of the keys suffice."""
    pairs = cos_P.shape[0]
    for p in range(pairs):
        first, second = query_D[p], query_D[p + pairs]
        out_D[p] = first * cos_P[p] + second * sin_P[p]
        out_D[p + pairs] = second * cos_P[p] - first * sin_P[p]
    for d in range(2 * pairs, query_D.shape[0]):
        out_D[d] = query_D[d]


@_jit
def _turn_keys(
    keys_OD: Any, num_keys: int, cos_OP: Any, sin_OP: Any, row_D: Any, out_DO: Any
) -> None:
    """Turn a page's keys by their offsets, transposed so that scores are vectors over offsets."""
    pairs = cos_OP.shape[1]
    for o in range(num_keys):
        _widen(keys_OD[o], row_D)
        for p in range(pairs):
            first, second = row_D[p], row_D[p + pairs]
            out_DO[p, o] = first * cos_OP[o, p] - second * sin_OP[o, p]
            out_DO[p + pairs, o] = second * cos_OP[o, p] + first * sin_OP[o, p]
        for d in range(2 * pairs, row_D.shape[0]):
            out_DO[d, o] = row_D[d]


@_jit
def _start_rows(
    query_THD: Any, token: int, position: int, head: int, num_rows: int, group: int, slot: int,
    page_size: int, tables: Any, scaling: Any, sinks_H: Any,
    turned_RD: Any, top_R: Any, weight_R: Any, sum_RV: Any,
) -> None:  # fmt: skip
    """Turn and scale the tile's queries; empty their running softmax."""
    start_cos, start_sin, offset_cos, offset_sin, attention_factor, logn = tables
    for r in range(num_rows):
        here = position + r // group
        h = head * group + r % group
        scale = scaling
        if logn[slot] > 0 and np.log(here + 1.0) > logn[slot]:
            scale = scaling * np.float32(np.log(here + 1.0) / logn[slot])
        rotary_scale = scale * attention_factor[slot] * attention_factor[slot]
        _turn_query(
            query_THD[token + r // group, h], here, page_size, slot,
            start_cos, start_sin, offset_cos, offset_sin,
            rotary_scale, scale, turned_RD[r],
        )  # fmt: skip
        # A sink is a logit of its own that carries no value.
        has_sink = sinks_H.shape[0] > 0
        top_R[r] = sinks_H[h] if has_sink else -np.inf
        weight_R[r] = 1.0 if has_sink else 0.0
        sum_RV[r] = 0.0


@_jit
def _accumulate(
    scores_O: Any, begin: int, end: int, softcap: Any, values_OV: Any,
    row: int, top_R: Any, weight_R: Any, sum_RV: Any,
) -> None:  # fmt: skip
    """Fold one page's visible scores into a row's running softmax."""
    value_dim = values_OV.shape[1]
    top = top_R[row]
    for o in range(begin, end):
        if softcap > 0:
            scores_O[o] = softcap * np.tanh(scores_O[o] / softcap)
        top = max(top, scores_O[o])
    keep = np.exp(top_R[row] - top)
    weight = weight_R[row] * keep
    for v in range(value_dim):
        sum_RV[row, v] *= keep
    for o in range(begin, end):
        share = np.exp(scores_O[o] - top)
        weight += share
        for v in range(value_dim):
            sum_RV[row, v] += share * values_OV[o, v]
    top_R[row], weight_R[row] = top, weight


@cache
def kernel(page_size: int) -> Any:
    """The kernel for one page size, which is a constant to the compiler."""

    @_jit
    def score(query_D: Any, keys_DO: Any, scores_O: Any) -> None:
        for o in range(page_size):
            scores_O[o] = 0.0
        for d in range(query_D.shape[0]):
            for o in range(page_size):
                scores_O[o] += query_D[d] * keys_DO[d, o]

    @_jit
    def attend(
        items_W3: Any, query_THD: Any, keys_NKOD: Any, values_NKOV: Any,
        page_table_SN: Any, query_start_S1: Any, first_position_S: Any, table_slot_S: Any,
        tables: Any, scaling: Any, window: int, softcap: Any, sinks_H: Any, out_THV: Any,
    ) -> None:  # fmt: skip
        start_cos, start_sin, offset_cos, offset_sin = tables[:4]
        dim, value_dim = query_THD.shape[2], values_NKOV.shape[3]
        group = query_THD.shape[1] // keys_NKOD.shape[1]
        turned_RD = np.empty((TILE * group, dim), np.float32)
        sum_RV = np.empty((TILE * group, value_dim), np.float32)
        top_R = np.empty(TILE * group, np.float32)
        weight_R = np.empty(TILE * group, np.float32)
        keys_DO = np.zeros((dim, page_size), np.float32)
        values_OV = np.zeros((page_size, value_dim), np.float32)
        row_D, back_D = np.empty(dim, np.float32), np.empty(dim, np.float32)
        scores_O = np.empty(page_size, np.float32)
        for w in range(items_W3.shape[0]):
            sequence, head, tile = items_W3[w]
            slot = table_slot_S[sequence]
            token = query_start_S1[sequence] + tile
            num_tokens = min(TILE, query_start_S1[sequence + 1] - token)
            num_rows = num_tokens * group
            position = first_position_S[sequence] + tile
            _start_rows(
                query_THD, token, position, head, num_rows, group, slot,
                page_size, tables, scaling, sinks_H,
                turned_RD, top_R, weight_R, sum_RV,
            )  # fmt: skip
            last = position + num_tokens - 1
            first_page = max(0, position - window + 1) // page_size if window > 0 else 0
            for page in range(first_page, last // page_size + 1):
                page_id = page_table_SN[sequence, page]
                start = page * page_size
                num_keys = min(page_size, last - start + 1)
                _turn_keys(
                    keys_NKOD[page_id, head], num_keys,
                    offset_cos[slot], offset_sin[slot], row_D, keys_DO,
                )  # fmt: skip
                for o in range(num_keys):
                    _widen(values_NKOV[page_id, head, o], values_OV[o])
                for r in range(num_rows):
                    here = position + r // group
                    end = min(num_keys, here - start + 1)
                    begin = max(0, here - window + 1 - start) if window > 0 else 0
                    if begin < end:
                        _turn_back(
                            turned_RD[r], start_cos[slot, page], start_sin[slot, page], back_D
                        )
                        score(back_D, keys_DO, scores_O)
                        _accumulate(
                            scores_O, begin, end, softcap, values_OV,
                            r, top_R, weight_R, sum_RV,
                        )  # fmt: skip
            for r in range(num_rows):
                for v in range(value_dim):
                    out_THV[token + r // group, head * group + r % group, v] = (
                        sum_RV[r, v] / weight_R[r]
                    )

    return attend
