"""The compiled kernel: attention over pages of unrotated keys, on a CPU.

A row is one query token under one query head. Rows are independent of each other. A row reads its
own pages in ascending order and reduces page by page. Its bits therefore do not depend on the
batch, the chunking, or the number of threads (design, section 5). The reference is
`attention/torch_backend.py`.

Rotation costs little here. A query is rotated to its absolute position once, and rotated back by
each page's start once per page. Keys are rotated by the small in-page table, once per tile of
queries.

Shapes: T = flat query tokens, C = columns that hold head beside head, H = query heads, K = key
heads, D = key dimensions, V = value dimensions, S = sequences or table slots, N = pages,
O = offsets in a page, W = work items, R = rows of a tile, B = rows of a block, L = lanes. In
scratch arrays O and V are rounded up to whole SIMD registers.
"""

from typing import Any

import numpy as np

from model_runtime.cpu_kernels.attention_block import BLOCK, rows_reader
from model_runtime.cpu_kernels.attention_dot import IN_PAIRS, SINGLY, Products
from model_runtime.cpu_kernels.bfloat16 import narrow, widen
from model_runtime.cpu_kernels.jit import jit
from model_runtime.cpu_kernels.simd import WIDTH, load, reduce_add

TILE = 32  # query tokens that use one rotation of a page's keys

_LINE = 64  # bytes in a cache line of the processor
_SPARE = 2  # unused rows that the last block of a tile may compute


@jit(borrows=True)
def _rotate_query(
    query_D: Any, position: int, page_size: int, slot: int, tables: Any,
    rotary_scale: Any, scale: Any, out_D: Any,
) -> None:  # fmt: skip
    """Rotate a query to its absolute position (addition formula) and scale it."""
    start_cos, start_sin, offset_cos, offset_sin = tables[:4]
    page, offset = position // page_size, position % page_size
    pairs = start_cos.shape[2]
    for p in range(pairs):
        a, b = start_cos[slot, page, p], start_sin[slot, page, p]
        c, d = offset_cos[slot, p, offset], offset_sin[slot, p, offset]
        cos, sin = a * c - b * d, b * c + a * d
        first, second = query_D[p], query_D[p + pairs]
        out_D[p] = (first * cos - second * sin) * rotary_scale
        out_D[p + pairs] = (second * cos + first * sin) * rotary_scale
    for d in range(2 * pairs, query_D.shape[0]):
        out_D[d] = query_D[d] * scale


@jit(borrows=True)
def write_kv(
    key_TC: Any, key_at: int, value_TC: Any, value_at: int, page_T: Any, offset_T: Any,
    keys_NKDO: Any, values_NKOV: Any,
) -> None:  # fmt: skip
    """Write new keys and values to their pages; they begin in columns `key_at` and `value_at`."""
    _, num_heads, dim, _ = keys_NKDO.shape
    value_dim = values_NKOV.shape[3]
    for t in range(key_TC.shape[0]):
        page, offset = page_T[t], offset_T[t]
        for head in range(num_heads):
            for d in range(dim):
                keys_NKDO[page, head, d, offset] = key_TC[t, key_at + head * dim + d]
            for v in range(value_dim):
                value = value_TC[t, value_at + head * value_dim + v]
                values_NKOV[page, head, offset, v] = value


@jit(borrows=True)
def _start_rows(
    query_TC: Any, token: int, position: int, head: int, num_rows: int, group: int, slot: int,
    page_size: int, tables: Any, scaling: Any, sinks_H: Any,
    query_D: Any, rotated_RD: Any, row_max_R: Any, row_sum_RL: Any, acc_RV: Any,
) -> None:  # fmt: skip
    """Rotate and scale the tile's queries, and initialize their online softmax."""
    attention_factor, logn = tables[4:]
    dim = query_D.shape[0]
    for r in range(num_rows):
        here = position + r // group
        h = head * group + r % group
        scale = scaling
        if logn[slot] > 0 and np.log(here + 1.0) > logn[slot]:
            scale = scaling * np.float32(np.log(here + 1.0) / logn[slot])
        rotary_scale = scale * attention_factor[slot] * attention_factor[slot]
        widen(query_TC[token + r // group, h * dim : (h + 1) * dim], query_D)
        _rotate_query(
            query_D, here, page_size, slot, tables, rotary_scale, scale, rotated_RD[r]
        )  # fmt: skip
        # A sink is an extra logit without a value.
        has_sink = sinks_H.shape[0] > 0
        row_max_R[r] = sinks_H[h] if has_sink else -np.inf
        row_sum_RL[r] = 0.0
        row_sum_RL[r, 0] = 1.0 if has_sink else 0.0
        acc_RV[r] = 0.0


@jit()
def _room(num_rows: int, width: int, dtype: Any) -> Any:
    """Return zeros that begin at the start of a cache line.

    A register is as long as a cache line. If an array begins elsewhere, each load reads two lines,
    and attention takes 5 percent longer.
    """
    numbers = np.zeros(num_rows * width + _LINE, dtype)
    at = -numbers.ctypes.data % _LINE // numbers.itemsize
    return numbers[at : at + num_rows * width].reshape(num_rows, width)


def _attention(products: Products) -> Any:
    """Compiled: the attention kernel for one way to multiply."""
    dtype, rotate_keys, place_values = products.dtype, products.rotate_keys, products.place_values
    read_rows = rows_reader(products)

    @jit()
    def attend(
        items_W3: Any, query_TC: Any, group: int, keys_NKDO: Any, values_NKOV: Any,
        page_table_SN: Any, cu_seqlens_S1: Any, first_position_S: Any, table_slot_S: Any,
        tables: Any, scaling: Any, window: int, softcap: Any, sinks_H: Any, out_TC: Any,
    ) -> None:  # fmt: skip
        """Compute the work items (sequence, key head, first query of a tile).

        Queries are in the first columns of `query_TC`, with `group` query heads for each key head.
        The output is head beside head in `out_TC`.
        """
        start_cos, start_sin, offset_cos, offset_sin = tables[:4]
        dim, page_size = keys_NKDO.shape[2:]
        value_dim = values_NKOV.shape[3]
        width_O, width_V = -(-page_size // WIDTH) * WIDTH, -(-value_dim // WIDTH) * WIDTH
        most_rows = TILE * group + _SPARE
        query_D = np.empty(dim, np.float32)
        rotated_RD = _room(most_rows, dim, np.float32)
        acc_RV = _room(most_rows, width_V, np.float32)
        row_max_R = np.empty(most_rows, np.float32)
        row_sum_RL = _room(most_rows, WIDTH, np.float32)
        back_BD = _room(BLOCK, dim, np.float32)
        query_BD = _room(BLOCK, dim, dtype)
        scores_BO = _room(BLOCK, width_O, np.float32)
        probs_BO = _room(BLOCK, width_O, dtype)
        keys_DO = _room(dim, width_O, dtype)
        scratch_OV = _room(page_size, width_V, values_NKOV.dtype)
        row_O = np.empty(width_O, np.float32)
        for w in range(items_W3.shape[0]):
            sequence, head, tile = items_W3[w]
            slot = table_slot_S[sequence]
            token = cu_seqlens_S1[sequence] + tile
            num_tokens = min(TILE, cu_seqlens_S1[sequence + 1] - token)
            num_rows = num_tokens * group
            position = first_position_S[sequence] + tile
            _start_rows(
                query_TC, token, position, head, num_rows, group, slot,
                page_size, tables, scaling, sinks_H,
                query_D, rotated_RD, row_max_R, row_sum_RL, acc_RV,
            )  # fmt: skip
            last = position + num_tokens - 1
            first_page = max(0, position - window + 1) // page_size if window > 0 else 0
            for page in range(first_page, last // page_size + 1):
                page_id = page_table_SN[sequence, page]
                start = page * page_size
                num_keys = min(page_size, last - start + 1)
                next_id = page_table_SN[sequence, page + 1] if page < last // page_size else -1
                rotate_keys(
                    keys_NKDO, values_NKOV, page_id, next_id, head, offset_cos, offset_sin, slot,
                    row_O, keys_DO,
                )  # fmt: skip
                values_OV = place_values(values_NKOV, page_id, head, num_keys, scratch_OV)
                read_rows(
                    num_rows, position, group, start, window, softcap,
                    slot, page, start_cos, start_sin,
                    rotated_RD, keys_DO, values_OV,
                    back_BD, query_BD, scores_BO, probs_BO, row_max_R, row_sum_RL, acc_RV,
                )  # fmt: skip
            for r in range(num_rows):
                weight = reduce_add(load(row_sum_RL, r * WIDTH))
                for v in range(value_dim):
                    acc_RV[r, v] /= weight
                at = (head * group + r % group) * value_dim
                narrow(acc_RV[r, :value_dim], out_TC[token + r // group, at : at + value_dim])

    return attend


attend, attend_in_pairs = _attention(SINGLY), _attention(IN_PAIRS)
