"""The compiled kernel, one block: rows that read a page together.

The rows of a block use each loaded register together (`register_sums.py`): a page's keys for their
scores, and its values for their accumulators. Each row's operations and their order are the same in
a block of any size. A row's bits therefore do not depend on the size of its block.

Shapes: D = key dimensions, V = value dimensions, S = rotation tables, N = pages, O = offsets in a
page, P = rotated pairs, R = rows of a tile, B = rows of a block, L = lanes.
"""

from typing import Any, NamedTuple

import numpy as np

from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import Products
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AngleArrays,
    Floats,
    Numbers,
    QueryTile,
    Scratch,
)
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.register_sums import load_sums, no_sums, store_sums
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    any_above,
    broadcast,
    exp,
    load,
    maximum,
    multiply,
    reduce_max,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.target import vectors


@jit(inline=True, borrows=True)
def update_softmax(
    scratch: Scratch, place: int, row: int, begin: int, end: int, softcap: np.float32
) -> None:
    """Compute probabilities from one page's scores, and update the row's online softmax.

    The row is number `place` of its block. It sees the page's offsets `begin` to `end` - 1.
    """
    scores_BO, probs_BO = scratch.scores_BO, scratch.probs_BO
    row_max_R, row_sum_RL, acc_RV = scratch.row_max_R, scratch.row_sum_RL, scratch.acc_RV
    width = scores_BO.shape[1]
    first, stop = place * width, (place + 1) * width
    if softcap > 0:
        for o in range(begin, end):
            scores_BO[place, o] = softcap * np.tanh(scores_BO[place, o] / softcap)
    for o in range(begin):
        scores_BO[place, o] = -np.inf
    for o in range(end, width):
        scores_BO[place, o] = -np.inf
    peak = load(scores_BO, first)
    for at in range(first + WIDTH, stop, WIDTH):
        peak = maximum(peak, load(scores_BO, at))
    top = row_max_R[row]
    if any_above(peak, broadcast(top)):  # seldom true, so later code need not wait for it
        top = reduce_max(peak)
        keep = broadcast(np.exp(row_max_R[row] - top))
        store(row_sum_RL, row * WIDTH, multiply(load(row_sum_RL, row * WIDTH), keep))
        for at in range(row * acc_RV.shape[1], (row + 1) * acc_RV.shape[1], WIDTH):
            store(acc_RV, at, multiply(load(acc_RV, at), keep))
        row_max_R[row] = top
    weight = load(row_sum_RL, row * WIDTH)
    for at in range(first, stop, WIDTH):
        probs = exp(subtract(load(scores_BO, at), broadcast(top)))
        weight = add(weight, probs)
        store(probs_BO, at, probs)
    store(row_sum_RL, row * WIDTH, weight)


# Rows of a block and registers per row, the largest block first. The sums, and one or two registers
# for their operands, should fit into the processor's registers. A decode step of a model with three
# query heads for each key head has blocks of three. With 16 registers, four rows take no longer.
_SHAPES = (
    ((8, 2), (4, 4), (3, 4), (1, 4))
    if vectors().num_registers >= 32
    else ((6, 2), (4, 2), (4, 2), (1, 4))
)
BLOCK, _FEW = _SHAPES[0][0], _SHAPES[2][0]


@jit(inline=True)
def seen(tile: QueryTile, row: int, start: int, window: int, page_size: int) -> tuple[int, int]:
    """Return the first offset of a page that a row sees, and the offset after the last.

    `start` is the page's first position.
    """
    end = tile.position + row // tile.group + 1 - start
    begin = max(0, end - window) if window > 0 else 0
    return begin, min(page_size, end)


@jit(inline=True)
def _own_row(tile: QueryTile, row: int) -> int:  # noqa: ARG001
    return row


@jit(inline=True)
def _own_start(tile: QueryTile, page: int) -> tuple[int, int]:
    return tile.table_id, page


class Walk(NamedTuple):
    """The part of a page that a tile's rows see, and from where; its functions are compiled."""

    seen: Any  # the offsets that a row sees: from this one, up to that one
    source: Any  # the row of rotated_RD with a row's query
    start: Any  # table and page of the angles of the page's start


# Every key at its own position.
PLAIN = Walk(seen, _own_row, _own_start)


def _multiplier(products: Products, num_rows: int, columns: int) -> tuple[Any, Any]:
    """Return `score` and `weigh` for `num_rows` rows, `columns` registers of each at a time."""
    add, step = products.add, products.step

    @jit(borrows=True)
    def score(query_BD: Numbers, keys_DO: Numbers, scores_BO: Floats) -> None:
        """Multiply the queries by a page's keys."""
        dim, width = keys_DO.shape
        at = 0
        while at + columns * WIDTH <= width:
            sums = no_sums(num_rows, columns)
            for d in range(0, dim, step):
                key = d * width + at * step
                sums = add(sums, query_BD, d, dim, keys_DO, key, columns)
            store_sums(scores_BO, at, width, sums, columns)
            at += columns * WIDTH
        while at < width:
            rest = no_sums(num_rows, 1)
            for d in range(0, dim, step):
                rest = add(rest, query_BD, d, dim, keys_DO, d * width + at * step, 1)
            store_sums(scores_BO, at, width, rest, 1)
            at += WIDTH

    @jit(borrows=True)
    def weigh(
        probs_BO: Numbers, place: int, values_OV: Numbers, begin: int, end: int, row: int,
        acc_RV: Floats,
    ) -> None:  # fmt: skip
        """Add probabilities times values, at offsets `begin` to `end` - 1, to the accumulators."""
        stride, width = probs_BO.shape[1], values_OV.shape[1]
        first = place * stride
        at = 0
        while at + columns * WIDTH <= width:
            start = row * width + at
            sums = load_sums(acc_RV, start, width, num_rows, columns)
            for o in range(begin, end, step):
                value = o * width + at * step
                sums = add(sums, probs_BO, first + o, stride, values_OV, value, columns)
            store_sums(acc_RV, start, width, sums, columns)
            at += columns * WIDTH
        while at < width:
            start = row * width + at
            rest = load_sums(acc_RV, start, width, num_rows, 1)
            for o in range(begin, end, step):
                value = o * width + at * step
                rest = add(rest, probs_BO, first + o, stride, values_OV, value, 1)
            store_sums(acc_RV, start, width, rest, 1)
            at += WIDTH

    return score, weigh


def _block_reader(
    products: Products, walk: Walk, weigh_row: Any, num_rows: int, columns: int
) -> Any:
    """Compiled: `num_rows` rows read one page; sums take `columns` registers per row."""
    score, weigh = _multiplier(products, num_rows, columns)
    rotate_query, step = products.rotate_query, products.step
    seen, source, angle_of = walk.seen, walk.source, walk.start

    @jit(borrows=True)
    def read(
        row: int, tile: QueryTile, page: int, window: int, softcap: np.float32,
        starts: AngleArrays, scratch: Scratch, values_OV: Numbers,
    ) -> None:  # fmt: skip
        probs_BO, acc_RV = scratch.probs_BO, scratch.acc_RV
        page_size = values_OV.shape[0]
        start = page * page_size
        table_id, angle = angle_of(tile, page)
        for place in range(num_rows):
            rotate_query(
                scratch.rotated_RD, source(tile, row + place), starts, table_id, angle,
                scratch.query_BD, place,
            )  # fmt: skip
        score(scratch.query_BD, scratch.keys_DO, scratch.scores_BO)
        # Keys that all rows see are weighed for all rows together, the others row by row. A key
        # that a row does not see is not even multiplied by zero, because it may be NaN. The range
        # of a later row begins and ends at later keys.
        _, all_end = seen(tile, row, start, window, page_size)
        all_begin, any_end = seen(tile, row + num_rows - 1, start, window, page_size)
        all_begin += all_begin % step
        all_end = max(all_begin, all_end - all_end % step)
        for place in range(num_rows):
            r = row + place
            begin, end = seen(tile, r, start, window, page_size)
            if begin < end:
                update_softmax(scratch, place, r, begin, end, softcap)
                if begin < all_begin:
                    weigh_row(probs_BO, place, values_OV, begin, min(end, all_begin), r, acc_RV)
        weigh(probs_BO, 0, values_OV, all_begin, all_end, row, acc_RV)
        if any_end <= all_end:
            return
        for place in range(num_rows):
            r = row + place
            begin, end = seen(tile, r, start, window, page_size)
            if all_end < end:
                weigh_row(probs_BO, place, values_OV, max(begin, all_end), end, r, acc_RV)

    return read


def rows_reader(products: Products, walk: Walk = PLAIN) -> Any:
    """Compiled: all rows of a tile read one page, block by block."""
    weigh_row = products.row_weigher(_multiplier(products, 1, 4)[1])
    readers = {shape: _block_reader(products, walk, weigh_row, *shape) for shape in set(_SHAPES)}
    read_block, read_4, read_few, read_1 = (readers[shape] for shape in _SHAPES)

    @jit(borrows=True)
    def read_rows(
        tile: QueryTile, page: int, window: int, softcap: np.float32,
        starts: AngleArrays, scratch: Scratch, values_OV: Numbers,
    ) -> None:  # fmt: skip
        row = 0
        while row < tile.num_rows:
            left = tile.num_rows - row
            if left >= BLOCK:
                read_block(row, tile, page, window, softcap, starts, scratch, values_OV)
                row += BLOCK
            elif left >= 4:
                read_4(row, tile, page, window, softcap, starts, scratch, values_OV)
                row += 4
            elif left >= 2:
                read_few(row, tile, page, window, softcap, starts, scratch, values_OV)
                row += _FEW
            else:
                read_1(row, tile, page, window, softcap, starts, scratch, values_OV)
                row += 1

    return read_rows
