"""The compiled kernel for ranges: a query reads each range at another position, on a CPU.

A row keeps one running softmax while the tile walks its pages in ascending order, so ranges need no
merge. A page on the boundary of two ranges is read twice, the earlier range first, and a row that
sees nothing of a range skips it. A row's bits therefore depend on its own ranges only. A query with
one range at the true positions has the bits of the plain kernel, whose parts these are.

Shapes: T = flat query tokens, C = columns that hold head beside head, H = query heads, K = key
heads, D = key dimensions, V = value dimensions, N = pages, O = offsets in a page, P = rotated
pairs, W = work items, R = rows of a tile, B = rows of a block, L = lanes, X = ranges of a query,
S = sequences, Q = tokens of a tile. In scratch arrays O and V are rounded up to whole SIMD
registers.
"""

from typing import Any, NamedTuple

import numpy as np

from ropewalk.model_runtime.cpu_kernels.attention.attention import (
    EXACT,
    EXACT_IN_PAIRS,
    SPARE,
    TILE,
    Source,
    finish_rows,
    room,
    rotate_query,
    row_scale,
    start_softmax,
)
from ropewalk.model_runtime.cpu_kernels.attention.attention_block import BLOCK, Walk, rows_reader
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import IN_PAIRS, SINGLY, Products
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AngleArrays,
    AttentionParams,
    Floats,
    Ints,
    Numbers,
    QueryTile,
    RotationArrays,
    Scratch,
    SequenceArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH


class RangeArrays(NamedTuple):
    """The ranges of a step's queries; a range without keys begins where it ends, or later.

    The key with index n is read at (n mod modulus) // divisor. A modulus of 0 is none, and under a
    divisor of 0 every key is at position 0.
    """

    begin_XT: Ints  # index of the first key
    end_XT: Ints  # index after the last key
    query_XT: Ints  # position at which the query stands
    modulus_SX: Ints  # a multiple of the page size
    divisor_SX: Ints  # divides the page size, or is a multiple of it


class RangeTile(NamedTuple):
    """Query tokens of one sequence under the query heads of one key head, in one range."""

    num_rows: int
    group: int  # query heads of the key head, so rows of a token
    range_index: int
    first_row: int  # of the queries that are rotated for this range
    begin_XQ: Ints  # index of the first key that a token sees
    end_XQ: Ints  # index after the last key
    table_id: int  # table and page of the angles at which the page is placed
    start_page: int


@jit(inline=True)
def _seen(tile: RangeTile, row: int, start: int, window: int, page_size: int) -> tuple[int, int]:  # noqa: ARG001
    """Return the first offset of a page that a row sees in this range, and the one after the last.

    The window is already in the tile's bounds.
    """
    token = row // tile.group
    begin = tile.begin_XQ[tile.range_index, token] - start
    end = tile.end_XQ[tile.range_index, token] - start
    return max(0, begin), min(page_size, end)


@jit(inline=True)
def _placed_row(tile: RangeTile, row: int) -> int:
    return tile.first_row + row


@jit(inline=True)
def _placed_start(tile: RangeTile, page: int) -> tuple[int, int]:  # noqa: ARG001
    return tile.table_id, tile.start_page


_BY_RANGE = Walk(_seen, _placed_row, _placed_start)


@jit(borrows=True)
def _bound_tile(
    ranges: RangeArrays, token: int, num_tokens: int, position: int, window: int, begin_XQ: Ints,
    end_XQ: Ints,
) -> None:  # fmt: skip
    """Set the keys that each token sees in each range, inside the layer's own window.

    The spare rows of a tile have the last token's.
    """
    for x in range(begin_XQ.shape[0]):
        for q in range(begin_XQ.shape[1]):
            at = min(q, num_tokens - 1)
            begin = ranges.begin_XT[x, token + at]
            if window > 0:
                begin = max(begin, position + at + 1 - window)
            begin_XQ[x, q], end_XQ[x, q] = begin, ranges.end_XT[x, token + at]


@jit(borrows=True)
def _start_rows(
    query_TC: Numbers, token: int, head: int, tile: QueryTile, page_size: int,
    params: AttentionParams, ranges: RangeArrays, query_D: Floats, most_rows: int, scratch: Scratch,
) -> None:  # fmt: skip
    """Rotate and scale the tile's queries for each range, and initialize their online softmax.

    The scale is that of the true position, wherever a range places the query.
    """
    tables, table_id = params.tables, tile.table_id
    logn, factor = tables.logn_S[table_id], tables.attention_factor_S[table_id]
    dim = query_D.shape[0]
    for r in range(tile.num_rows):
        at = r // tile.group
        h = head * tile.group + r % tile.group
        scale = row_scale(tile.position + at, logn, params.scaling)
        rotary_scale = scale * factor * factor
        widen(query_TC[token + at, h * dim : (h + 1) * dim], query_D)
        for x in range(ranges.query_XT.shape[0]):
            if ranges.begin_XT[x, token + at] < ranges.end_XT[x, token + at]:
                rotate_query(
                    query_D, ranges.query_XT[x, token + at], page_size, table_id, tables,
                    rotary_scale, scale, scratch.rotated_RD[x * most_rows + r],
                )  # fmt: skip
        start_softmax(r, h, params.sinks_H, scratch)


@jit(borrows=True)
def _divide_offsets(
    offsets: AngleArrays, table_id: int, divisor: int, x: int, divided: AngleArrays
) -> None:
    """Set the angles inside a page, whose keys stand at their offset // divisor."""
    _, num_pairs, page_size = divided.cos.shape
    for p in range(num_pairs):
        for o in range(page_size):
            if divisor == 0 or divisor >= page_size:  # all keys of a page are at one position
                divided.cos[x, p, o], divided.sin[x, p, o] = 1.0, 0.0
            else:
                at = o // divisor
                divided.cos[x, p, o] = offsets.cos[table_id, p, at]
                divided.sin[x, p, o] = offsets.sin[table_id, p, at]


@jit(borrows=True)
def _place_page(
    position: int, page_size: int, table_id: int, starts: AngleArrays, offsets: AngleArrays,
    placed: AngleArrays,
) -> None:  # fmt: skip
    """Set the angles of a page's start, which may be at any position."""
    page, offset = position // page_size, position % page_size
    for p in range(placed.cos.shape[2]):
        a, b = starts.cos[table_id, page, p], starts.sin[table_id, page, p]
        c, d = offsets.cos[table_id, p, offset], offsets.sin[table_id, p, offset]
        placed.cos[0, 0, p], placed.sin[0, 0, p] = a * c - b * d, b * c + a * d


def ranges_kernel(products: Products, source: Source) -> Any:
    """Compiled: the kernel that reads ranges, for one way to multiply and one source of pages."""
    dtype = products.dtype
    named, sides, most_tokens, page_room, locate, rotate_keys, place_values = source
    read_rows = rows_reader(products, _BY_RANGE)

    @jit(apart=True)
    def attend_ranges(
        items_W3: Ints, query_TC: Numbers, group: int, plain_pages: tuple[Any, ...],
        plain_sequences: tuple[Any, ...], plain_ranges: tuple[Any, ...],
        plain_params: tuple[Any, ...], out_TC: Numbers,
    ) -> None:  # fmt: skip
        """Compute the work items, as the plain kernel does; `plain_ranges`: see RangeArrays."""
        sequences, ranges = SequenceArrays(*plain_sequences), RangeArrays(*plain_ranges)
        params = AttentionParams(RotationArrays(*plain_params[0]), *plain_params[1:])
        pages = named(plain_pages)
        starts = AngleArrays(params.tables.start_cos_SNP, params.tables.start_sin_SNP)
        offsets = AngleArrays(params.tables.offset_cos_SPO, params.tables.offset_sin_SPO)
        dim, page_size, value_dim = sides(pages)
        num_pairs = starts.cos.shape[2]
        num_ranges = ranges.begin_XT.shape[0]
        width_O, width_V = -(-page_size // WIDTH) * WIDTH, -(-value_dim // WIDTH) * WIDTH
        most_rows = TILE * group + SPARE
        query_D = np.empty(dim, np.float32)
        scratch = Scratch(
            room(num_ranges * most_rows, dim, np.float32), room(dim, width_O, dtype),
            room(BLOCK, dim, dtype),
            room(BLOCK, width_O, np.float32), room(BLOCK, width_O, dtype),
            np.empty(most_rows, np.float32), room(most_rows, WIDTH, np.float32),
            room(most_rows, width_V, np.float32),
        )  # fmt: skip
        scratch_OV, row_X = page_room(pages, width_V)
        in_page = (num_ranges, num_pairs, page_size)
        divided = AngleArrays(np.empty(in_page, np.float32), np.empty(in_page, np.float32))
        one_start = (1, 1, num_pairs)
        placed = AngleArrays(np.empty(one_start, np.float32), np.empty(one_start, np.float32))
        begin_XQ = np.empty((num_ranges, TILE + SPARE), np.int64)
        end_XQ = np.empty((num_ranges, TILE + SPARE), np.int64)
        prepared = -1  # the sequence that `divided` is for
        for w in range(items_W3.shape[0]):
            sequence, head, first_query = items_W3[w]
            table_id = sequences.table_id_S[sequence]
            token = sequences.cu_seqlens_S1[sequence] + first_query
            num_left = sequences.cu_seqlens_S1[sequence + 1] - token
            position = sequences.first_position_S[sequence] + first_query
            num_tokens = min(most_tokens(pages, position), num_left)
            num_rows = num_tokens * group
            whole = QueryTile(num_rows, position, group, table_id)
            _bound_tile(ranges, token, num_tokens, position, params.window, begin_XQ, end_XQ)
            _start_rows(
                query_TC, token, head, whole, page_size, params, ranges, query_D, most_rows, scratch
            )
            if sequence != prepared:
                for x in range(num_ranges):
                    divisor = ranges.divisor_SX[sequence, x]
                    if divisor != 1:
                        _divide_offsets(offsets, table_id, divisor, x, divided)
                prepared = sequence
            page_table_N = sequences.page_table_SN[sequence]
            last = position + num_tokens - 1
            own = last // page_size
            for page in range(own + 1):
                start = page * page_size
                num_keys = min(page_size, last - start + 1)
                rotated = -1  # the divisor that the page's keys are rotated for
                for x in range(num_ranges):
                    # No row's range begins before the first row's or ends after the last one's.
                    if begin_XQ[x, 0] >= start + page_size or end_XQ[x, num_tokens - 1] <= start:
                        continue
                    place = locate(pages, page_table_N, page, token, own)
                    divisor, modulus = (
                        ranges.divisor_SX[sequence, x],
                        ranges.modulus_SX[sequence, x],
                    )
                    if divisor != rotated:
                        next_id = page_table_N[page + 1] if page < own else -1
                        if divisor == 1:
                            rotate_keys(
                                pages, place, next_id, head, offsets, table_id, row_X,
                                scratch.keys_DO,
                            )  # fmt: skip
                        else:
                            rotate_keys(
                                pages, place, next_id, head, divided, x, row_X, scratch.keys_DO
                            )
                        rotated = divisor
                    at = start % modulus if modulus > 0 else start
                    at = at // divisor if divisor > 0 else 0
                    values_OV = place_values(pages, place, head, num_keys, row_X, scratch_OV)
                    is_page = at % page_size == 0  # so its angles are in the table
                    tile = RangeTile(
                        num_rows, group, x, x * most_rows, begin_XQ, end_XQ,
                        table_id if is_page else 0, at // page_size if is_page else 0,
                    )  # fmt: skip
                    if is_page:
                        read_rows(tile, page, 0, params.softcap, starts, scratch, values_OV)
                    else:
                        _place_page(at, page_size, table_id, starts, offsets, placed)
                        read_rows(tile, page, 0, params.softcap, placed, scratch, values_OV)
            finish_rows(num_rows, group, head, token, scratch, value_dim, out_TC)

    return attend_ranges


attend_ranges = ranges_kernel(SINGLY, EXACT)
attend_ranges_in_pairs = ranges_kernel(IN_PAIRS, EXACT_IN_PAIRS)
