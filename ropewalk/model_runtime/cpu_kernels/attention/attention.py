"""The compiled kernel: attention over pages of unrotated keys, on a CPU.

A row is one query token under one query head. Rows are independent of each other. A row reads its
own pages in ascending order and reduces page by page. Its bits therefore do not depend on the
batch, the chunking, or the number of threads. The reference is
`attention/torch_backend.py`.

Rotation costs little here. A query is rotated to its absolute position once, and rotated back by
each page's start once per page. Keys are rotated by the small in-page table, once per tile of
queries.

Shapes: T = flat query tokens, C = columns that hold head beside head, H = query heads, K = key
heads, D = key dimensions, V = value dimensions, S = sequences or tables, N = pages,
O = offsets in a page, W = work items, R = rows of a tile, B = rows of a block, L = lanes. In
scratch arrays O and V are rounded up to whole SIMD registers.
"""

from typing import Any, NamedTuple

import numpy as np

from ropewalk.model_runtime.cpu_kernels.attention.attention_block import BLOCK, rows_reader
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import IN_PAIRS, SINGLY, Products
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AngleArrays,
    AttentionParams,
    Floats,
    Ints,
    Numbers,
    PageArrays,
    QueryTile,
    RotationArrays,
    Scratch,
    SequenceArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import as_cached, narrow, widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, load, reduce_add

TILE = 32  # query tokens that use one rotation of a page's keys

_LINE = 64  # bytes in a cache line of the processor
SPARE = 2  # unused rows that the last block of a tile may compute


@jit(borrows=True)
def rotate_query(
    query_D: Floats, position: int, page_size: int, table_id: int, tables: RotationArrays,
    rotary_scale: np.float32, scale: np.float32, out_D: Floats,
) -> None:  # fmt: skip
    """Rotate a query to its absolute position (addition formula) and scale it."""
    start_cos, start_sin = tables.start_cos_SNP, tables.start_sin_SNP
    offset_cos, offset_sin = tables.offset_cos_SPO, tables.offset_sin_SPO
    page, offset = position // page_size, position % page_size
    pairs = start_cos.shape[2]
    for p in range(pairs):
        a, b = start_cos[table_id, page, p], start_sin[table_id, page, p]
        c, d = offset_cos[table_id, p, offset], offset_sin[table_id, p, offset]
        cos, sin = a * c - b * d, b * c + a * d
        first, second = query_D[p], query_D[p + pairs]
        out_D[p] = (first * cos - second * sin) * rotary_scale
        out_D[p + pairs] = (second * cos + first * sin) * rotary_scale
    for d in range(2 * pairs, query_D.shape[0]):
        out_D[d] = query_D[d] * scale


@jit(borrows=True, apart=True)
def write_kv(
    key_TC: Numbers, key_at: int, value_TC: Numbers, value_at: int, page_T: Ints, offset_T: Ints,
    keys_NKDO: Numbers, values_NKOV: Numbers,
) -> None:  # fmt: skip
    """Write new keys and values to their pages; they begin in columns `key_at` and `value_at`.

    Pages in bfloat16 have float32 numbers rounded to nearest even.
    """
    _, num_heads, dim, _ = keys_NKDO.shape
    value_dim = values_NKOV.shape[3]
    for t in range(key_TC.shape[0]):
        page, offset = page_T[t], offset_T[t]
        for head in range(num_heads):
            for d in range(dim):
                key = key_TC[t, key_at + head * dim + d]
                keys_NKDO[page, head, d, offset] = as_cached(key, keys_NKDO)
            for v in range(value_dim):
                value = value_TC[t, value_at + head * value_dim + v]
                values_NKOV[page, head, offset, v] = as_cached(value, values_NKOV)


@jit(inline=True, borrows=True)
def start_softmax(row: int, head: int, sinks_H: Floats, scratch: Scratch) -> None:
    """Initialize the online softmax of a row. A sink is an extra logit without a value."""
    has_sink = sinks_H.shape[0] > 0
    scratch.row_max_R[row] = sinks_H[head] if has_sink else -np.inf
    scratch.row_sum_RL[row] = 0.0
    scratch.row_sum_RL[row, 0] = 1.0 if has_sink else 0.0
    scratch.acc_RV[row] = 0.0


@jit(inline=True)
def row_scale(position: int, logn: float, scaling: np.float32) -> np.float32:
    """Return the scale of the logits of a query at a true position, with log-n."""
    if logn > 0 and np.log(position + 1.0) > logn:
        return scaling * np.float32(np.log(position + 1.0) / logn)
    return scaling


@jit(borrows=True)
def start_rows(
    query_TC: Numbers, token: int, head: int, tile: QueryTile, page_size: int,
    params: AttentionParams, query_D: Floats, scratch: Scratch,
) -> None:  # fmt: skip
    """Rotate and scale the tile's queries, and initialize their online softmax.

    `token` is the tile's first token in the flat row, and `head` its key head.
    """
    tables, table_id, sinks_H = params.tables, tile.table_id, params.sinks_H
    logn, factor = tables.logn_S[table_id], tables.attention_factor_S[table_id]
    dim = query_D.shape[0]
    for r in range(tile.num_rows):
        here = tile.position + r // tile.group
        h = head * tile.group + r % tile.group
        scale = row_scale(here, logn, params.scaling)
        rotary_scale = scale * factor * factor
        widen(query_TC[token + r // tile.group, h * dim : (h + 1) * dim], query_D)
        rotate_query(
            query_D, here, page_size, table_id, tables, rotary_scale, scale, scratch.rotated_RD[r]
        )
        start_softmax(r, h, sinks_H, scratch)


@jit(borrows=True)
def finish_rows(
    num_rows: int, group: int, head: int, token: int, scratch: Scratch, value_dim: int,
    out_TC: Numbers,
) -> None:  # fmt: skip
    """Divide a tile's sums by the weights, and write them to the output."""
    row_sum_RL, acc_RV = scratch.row_sum_RL, scratch.acc_RV
    for r in range(num_rows):
        row_sum = reduce_add(load(row_sum_RL, r * WIDTH))
        for v in range(value_dim):
            acc_RV[r, v] /= row_sum
        at = (head * group + r % group) * value_dim
        narrow(acc_RV[r, :value_dim], out_TC[token + r // group, at : at + value_dim])


@jit()
def room(num_rows: int, width: int, dtype: Any) -> Any:
    """Return zeros that begin at the start of a cache line.

    A register is as long as a cache line. If an array begins elsewhere, each load reads two lines,
    and attention takes 5 percent longer.
    """
    numbers = np.zeros(num_rows * width + _LINE, dtype)
    at = -numbers.ctypes.data % _LINE // numbers.itemsize
    return numbers[at : at + num_rows * width].reshape(num_rows, width)


class Source(NamedTuple):
    """Where a kernel finds the keys and values of a page; its functions are compiled.

    `pages` is what `named` makes of the plain tuple that Python passes. A place is where a page
    lies, as `locate` says it.
    """

    named: Any  # (plain tuple) -> pages
    sides: Any  # (pages) -> key dimensions, positions of a page, value dimensions
    most_tokens: Any  # (pages, position) -> the tokens from a position on that one tile may have
    room: Any  # (pages, V) -> scratch_OV, and floats for the two functions below
    locate: Any  # (pages, page_table_N, page, token, own page) -> place
    rotate_keys: Any  # rotates a page's keys into keys_DO
    place_values: Any  # returns a page's first values, each row padded to whole SIMD registers


@jit(inline=True)
def _named(plain_pages: tuple[Any, ...]) -> PageArrays:
    return PageArrays(*plain_pages)


@jit(inline=True)
def _sides(pages: PageArrays) -> tuple[int, int, int]:
    return pages.keys_NKDO.shape[2], pages.keys_NKDO.shape[3], pages.values_NKOV.shape[3]


@jit(inline=True)
def _most_tokens(pages: PageArrays, position: int) -> int:  # noqa: ARG001
    return TILE


@jit()
def _room(pages: PageArrays, width_V: int) -> Any:
    page_size = pages.keys_NKDO.shape[3]
    row_O = np.empty(-(-page_size // WIDTH) * WIDTH, np.float32)
    return room(page_size, width_V, pages.values_NKOV.dtype), row_O


@jit(inline=True)
def _locate(pages: PageArrays, page_table_N: Ints, page: int, token: int, own: int) -> int:  # noqa: ARG001
    return page_table_N[page]  # type: ignore[no-any-return]


def exact_source(products: Products) -> Source:
    """Return the source of pages that hold numbers as they were written."""
    place, rotate = products.place_values, products.rotate_keys

    @jit()
    def place_values(
        pages: PageArrays, page_id: int, head: int, num_keys: int, row_X: Floats,  # noqa: ARG001
        scratch_OV: Numbers,
    ) -> Any:  # fmt: skip
        return place(pages.values_NKOV, page_id, head, num_keys, scratch_OV)

    return Source(_named, _sides, _most_tokens, _room, _locate, rotate, place_values)


def attention_kernel(products: Products, source: Source) -> Any:
    """Compiled: the attention kernel for one way to multiply and one source of pages."""
    dtype = products.dtype
    named, sides, most_tokens, page_room, locate, rotate_keys, place_values = source
    read_rows = rows_reader(products)

    @jit(apart=True)
    def attend(
        items_W3: Ints, query_TC: Numbers, group: int, plain_pages: tuple[Any, ...],
        plain_sequences: tuple[Any, ...], plain_params: tuple[Any, ...], out_TC: Numbers,
    ) -> None:  # fmt: skip
        """Compute the work items (sequence, key head, first query of a tile).

        Queries are in the first columns of `query_TC`, with `group` query heads for each key head.
        The output is head beside head in `out_TC`. The plain tuples are the source's pages, a
        SequenceArrays and an AttentionParams.
        """
        sequences = SequenceArrays(*plain_sequences)
        params = AttentionParams(RotationArrays(*plain_params[0]), *plain_params[1:])
        pages = named(plain_pages)
        starts = AngleArrays(params.tables.start_cos_SNP, params.tables.start_sin_SNP)
        offsets = AngleArrays(params.tables.offset_cos_SPO, params.tables.offset_sin_SPO)
        window, softcap = params.window, params.softcap
        dim, page_size, value_dim = sides(pages)
        width_O, width_V = -(-page_size // WIDTH) * WIDTH, -(-value_dim // WIDTH) * WIDTH
        most_rows = TILE * group + SPARE
        query_D = np.empty(dim, np.float32)
        rotated_RD = room(most_rows, dim, np.float32)
        acc_RV = room(most_rows, width_V, np.float32)
        row_max_R = np.empty(most_rows, np.float32)
        row_sum_RL = room(most_rows, WIDTH, np.float32)
        query_BD = room(BLOCK, dim, dtype)
        scores_BO = room(BLOCK, width_O, np.float32)
        probs_BO = room(BLOCK, width_O, dtype)
        keys_DO = room(dim, width_O, dtype)
        # A tuple counts a reference to each array, so it is made once and not for each page.
        scratch = Scratch(
            rotated_RD, keys_DO, query_BD, scores_BO, probs_BO, row_max_R, row_sum_RL,
            acc_RV,
        )  # fmt: skip
        scratch_OV, row_X = page_room(pages, width_V)
        for w in range(items_W3.shape[0]):
            sequence, head, first_query = items_W3[w]
            table_id = sequences.table_id_S[sequence]
            token = sequences.cu_seqlens_S1[sequence] + first_query
            num_left = sequences.cu_seqlens_S1[sequence + 1] - token
            position = sequences.first_position_S[sequence] + first_query
            num_tokens = min(most_tokens(pages, position), num_left)
            num_rows = num_tokens * group
            tile = QueryTile(num_rows, position, group, table_id)
            start_rows(query_TC, token, head, tile, page_size, params, query_D, scratch)
            page_table_N = sequences.page_table_SN[sequence]
            last = position + num_tokens - 1
            own = last // page_size
            first_page = max(0, position - window + 1) // page_size if window > 0 else 0
            for page in range(first_page, own + 1):
                place = locate(pages, page_table_N, page, token, own)
                num_keys = min(page_size, last - page * page_size + 1)
                next_id = page_table_N[page + 1] if page < own else -1
                rotate_keys(pages, place, next_id, head, offsets, table_id, row_X, keys_DO)
                values_OV = place_values(pages, place, head, num_keys, row_X, scratch_OV)
                read_rows(tile, page, window, softcap, starts, scratch, values_OV)
            finish_rows(num_rows, group, head, token, scratch, value_dim, out_TC)

    return attend


EXACT, EXACT_IN_PAIRS = exact_source(SINGLY), exact_source(IN_PAIRS)
attend = attention_kernel(SINGLY, EXACT)
attend_in_pairs = attention_kernel(IN_PAIRS, EXACT_IN_PAIRS)
