"""Rows times weights of few bits, whose scales multiply the sums of groups.

Rounded rows are multiplied in integers. The products of a group are summed exactly. A sum becomes
float32 and is multiplied by both scales, and these numbers are added in the order of the groups. No
operation is fused with another, so a row has the same bits in any batch, on every processor.
Formats with minima add the group's offset times the scaled sum of the row's codes.

Rows of bfloat16 are multiplied in pairs by the integers of weights, which are exact in bfloat16.
So neither is rounded, and the scale needs no product for each weight.

The outputs of weights in float32 that share an input with others are products of the rows in
float32, before rounding, as in `products.py`.

Shapes: R = rows, K = inputs, N = outputs, B = bytes of a record (rounded_rows.py).
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.byte_codes import QUAD, bytes_of, chunk_unpacker
from ropewalk.model_runtime.cpu_kernels.low_bits.choose import chooser
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32, FORMATS, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.group_dots import (
    Dots,
    few_rows_adder,
    group_adder,
)
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.integer_dot import num_shorts
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.paired_rows import pairer
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.rounded_rows import (
    Records,
    RowMaker,
    places_of,
    rounder,
)
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import table_at
from ropewalk.model_runtime.cpu_kernels.low_bits.widen import numbers_of, widener
from ropewalk.model_runtime.cpu_kernels.register_sums import add_products, load_sums, store_sums
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (
    CHUNK,
    PANEL,
    Multiplying,
    Panels,
    RowProducts,
    rows_adder,
    write_totals,
)
from ropewalk.model_runtime.cpu_kernels.target import vectors
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, run_shares

_MOST_ROWS = 256  # whose sums are kept while a panel is read once
_INPUTS = 256  # of a panel whose codes are at hand in the level-1 cache
_LINE_BYTES = 64
# With so many rows, weights stay in registers for 4, 2 or 1 of them at once. Nine to sixteen rows
# took 0.8 to 1.2 times as long so as with a chunk, by format, on an AMD EPYC of the fourth
# generation.
_MOST_FEW = 8 if WIDTH == 16 else 1
_ROWS_TO_SHARE = 8  # fewer are rounded before another thread has begun
# Rows of a tile and registers per row, as in skinny_gemm.py. Sums are there twice: of integers, and
# of float32.
_TILES = (
    ((6, 2), (4, 2), (2, 4), (1, 4))
    if WIDTH == 16
    else ((4, 2), (2, 4), (1, 4))
    if vectors().num_registers >= 32
    else ((2, 2), (1, 4))
)


@cache
def _tile_adder(group: int, has_minimum: int, dots: Dots, num_rows: int, columns: int) -> Any:
    """Compiled: `num_rows` rows times a chunk of a panel."""
    add_group = group_adder(group, has_minimum, dots)
    width = columns * WIDTH
    code_bytes, sum_bytes = dots.code_bytes, dots.sum_bytes

    @jit(borrows=True, fuses=False)
    def add_tile(
        records_RB: Records, codes_at: int, scales_at: int, sums_at: int, zero: int,
        num_inputs: int, weights: Records, begin: int, scales: Floats, offsets: Floats,
        sums: Floats, row: int,
    ) -> None:  # fmt: skip
        stride = records_RB.shape[1]
        for column in range(0, PANEL, width):
            tile = load_sums(sums, row * PANEL + column, PANEL, num_rows, columns)
            for start in range(0, num_inputs, group):
                tile = add_group(
                    tile, records_RB, codes_at + start * code_bytes, scales_at + start // 32 * 4,
                    sums_at + start // group * sum_bytes, stride, zero,
                    weights, begin + start * PANEL * code_bytes + column * QUAD,
                    scales, start // group * PANEL + column, offsets, columns,
                )  # fmt: skip
            store_sums(sums, row * PANEL + column, PANEL, tile, columns)

    return add_tile


@cache
def _rows_adder(group: int, has_minimum: int, dots: Dots) -> Any:
    """Compiled: any number of rows, times a chunk of a panel."""
    adders = {
        num_rows: _tile_adder(group, has_minimum, dots, num_rows, columns)
        for num_rows, columns in _TILES
    }
    most, add_most = next(iter(adders.items()))
    add_4, add_2, add_1 = (adders.get(count, add_most) for count in (4, 2, 1))

    @jit(borrows=True, apart=True)
    def add_rows(
        records_RB: Records, top: int, num_rows: int, codes_at: int, scales_at: int, sums_at: int,
        zero: int, num_inputs: int, weights: Records, begin: int, scales: Floats, offsets: Floats,
        sums: Floats,
    ) -> None:  # fmt: skip
        row, stride = 0, records_RB.shape[1]
        while row < num_rows:
            left, first = num_rows - row, (top + row) * stride
            arguments = (
                records_RB, first + codes_at, first + scales_at, first + sums_at, zero, num_inputs,
                weights, begin, scales, offsets, sums, row,
            )  # fmt: skip
            if left >= most:
                add_most(*arguments)
                row += most
            elif left >= 4:
                add_4(*arguments)
                row += 4
            elif left >= 2:
                add_2(*arguments)
                row += 2
            else:
                add_1(*arguments)
                row += 1

    return add_rows


@cache
def _chunk_adder(kind: Format, num_orders: int, *, in_pairs: bool) -> Any:
    """Compiled: rows times inputs `chunk` to `stop` - 1 of a panel, in one format."""
    unpack = chunk_unpacker(kind, in_pairs=in_pairs)
    order, zero, most = bytes_of(kind)
    dots = Dots(in_pairs=True) if in_pairs else Dots(num_shorts(most))
    add_rows = _rows_adder(kind.group, int(kind.has_minimum), dots)
    sizes = (min(rows, _MOST_FEW) for rows in (1, 2, 4))  # others are not compiled
    add_1, add_2, add_4 = (few_rows_adder(kind, dots, rows) for rows in sizes)
    group, few = kind.group, _MOST_FEW
    pairs, code_bytes, sum_bytes = int(in_pairs), dots.code_bytes, dots.sum_bytes

    @jit(borrows=True)
    def add_chunk(
        panel: int, records_RB: Records, top: int, num_rows: int, num_inputs: int, chunk: int,
        stop: int, weights: Records, begin: int, scales: Floats, offsets: Floats, sums: Floats,
    ) -> None:  # fmt: skip
        places = places_of(num_inputs, num_orders, pairs)
        codes_at = (order * num_inputs + chunk) * code_bytes
        scales_at = places.scales + chunk // 32 * 4
        sums_at = (places.sums if group == 32 else places.half_sums) + chunk // group * sum_bytes
        if num_rows <= few:
            row = 0
            while row < num_rows:
                record, left = (top + row) * records_RB.shape[1], num_rows - row
                arguments = (
                    panel, chunk, stop, records_RB, record + codes_at, record + scales_at,
                    record + sums_at, zero, sums, row,
                )  # fmt: skip
                if left >= 4:
                    add_4(*arguments)
                    row += 4
                elif left >= 2:
                    add_2(*arguments)
                    row += 2
                else:
                    add_1(*arguments)
                    row += 1
            return
        unpack(panel, chunk, stop, weights, begin, scales, offsets)
        add_rows(
            records_RB, top, num_rows, codes_at, scales_at, sums_at, zero, stop - chunk, weights,
            begin, scales, offsets, sums,
        )  # fmt: skip

    return add_chunk


@cache
def _floats_adder() -> Any:
    """Compiled: rows before rounding, times a panel of float32."""
    widen = widener((FLOAT32.number,))
    add_rows = rows_adder(add_products, 1, 0)

    @jit(apart=True)
    def add_panel(panel: int, x_RK: Floats, top: int, num_rows: int, sums: Floats) -> None:
        num_inputs = x_RK.shape[1]
        wide_Q = np.empty(CHUNK * PANEL, np.float32)
        for chunk in range(0, num_inputs, CHUNK):
            stop = min(num_inputs, chunk + CHUNK)
            widen(FLOAT32.number, panel, chunk, stop, wide_Q)
            base = -chunk * PANEL
            add_rows(x_RK, top, num_rows, chunk, stop, np.int64(0), wide_Q, base, sums)

    return add_panel


@cache
def _multiplier(
    numbers: tuple[int, ...], num_orders: int, has_floats: int, *, in_pairs: bool
) -> Any:
    """Compiled: records of rows times panels of the formats with these numbers."""
    add_chunk = chooser(
        (each, _chunk_adder(FORMATS[each], num_orders, in_pairs=in_pairs)) for each in numbers
    )
    add_floats = _floats_adder() if has_floats else add_chunk
    floats, chunk_bytes = FLOAT32.number, _INPUTS * PANEL * (2 if in_pairs else 1)

    @jit()
    def multiply(
        rows: Any, _: Numbers, bias_N: Numbers, out_RN: Numbers, layout: int, __: int,
        first_panel: int, end_panel: int,
    ) -> None:  # fmt: skip
        """Write the outputs of panels `first_panel` to `end_panel` - 1.

        `rows`: records, and the rows in float32, if there are weights in float32. `layout` is the
        address of the table of panels.
        """
        records_RB, x_RK = rows
        num_all, num_inputs = x_RK.shape
        table_P2 = carray(table_at(layout), (end_panel, 2))
        sums = np.empty((min(num_all, _MOST_ROWS), PANEL), np.float32)
        bias = np.empty(PANEL, np.float32)
        weights = np.empty(chunk_bytes + _LINE_BYTES, np.uint8)
        begin = -weights.ctypes.data % _LINE_BYTES
        scales = np.empty(_INPUTS // 16 * PANEL, np.float32)
        offsets = np.empty(_INPUTS // 16 * PANEL, np.float32)
        # Records of more rows do not fit the level-2 cache. One thread's part has all rows.
        for top in range(0, num_all, _MOST_ROWS):
            num_rows = min(_MOST_ROWS, num_all - top)
            for panel in range(first_panel, end_panel):
                address, number = table_P2[panel, 0], table_P2[panel, 1]
                sums[:] = np.float32(0.0)
                if has_floats and number == floats:
                    add_floats(address, x_RK, top, num_rows, sums)
                else:
                    for chunk in range(0, num_inputs, _INPUTS):
                        stop = min(num_inputs, chunk + _INPUTS)
                        arguments = (
                            address, records_RB, top, num_rows, num_inputs, chunk, stop, weights,
                            begin, scales, offsets, sums,
                        )  # fmt: skip
                        add_chunk(number, arguments)
                write_totals(sums, num_rows, bias_N, bias, out_RN, top, panel * PANEL)

    return multiply


@jit()
def _records_between(rows: Any, top: int, stop: int) -> Any:
    """Return records `top` to `stop` - 1, and the same rows in float32."""
    return rows[0][top:stop], rows[1][top:stop]


class Grouping(NamedTuple):
    """The way to multiply rows by the panels of a model, group by group."""

    multiplying: Multiplying  # its rows are records, and the rows in float32
    record_bytes: Callable[[int], int]  # of a row with so many inputs
    is_widened: bool  # whether products also read rows in float32, which are no others
    make_part: Any  # of the records of many rows (`RowMaker`)


def rounding_of(formats: Iterable[Format], dtype: torch.dtype) -> Grouping:
    """Return the way for rows of a number type that are rounded to eight bits.

    One of the formats of the panels has few bits.
    """
    is_bfloat16 = dtype == torch.bfloat16
    return _grouping(
        set(formats), dtype, lambda orders, _: rounder(orders, int(is_bfloat16)), in_pairs=False
    )._replace(is_widened=is_bfloat16)


def pairing_of(formats: Iterable[Format]) -> Grouping:
    """Return the way for rows of bfloat16 that are multiplied in pairs, as they are."""
    return _grouping(set(formats), torch.bfloat16, pairer, in_pairs=True)


def _grouping(
    kinds: set[Format], dtype: torch.dtype, maker: Callable[[int, int], RowMaker], *, in_pairs: bool
) -> Grouping:
    """Return a way. `maker`: of records, from the number of orders and whether there are floats."""
    numbers, has_floats = numbers_of(kinds - {FLOAT32}), FLOAT32 in kinds
    num_orders = 1 + max(bytes_of(FORMATS[each]).order for each in numbers)
    places: Any = places_of  # which Python calls without compiling it
    rows, make_part = maker(num_orders, int(has_floats))
    multiply = _multiplier(numbers, num_orders, int(has_floats), in_pairs=in_pairs)
    return Grouping(
        Multiplying(dtype, 2 if in_pairs else 1, rows, multiply, _records_between),
        lambda num_inputs: places.py_func(num_inputs, num_orders, int(in_pairs)).num_bytes,
        has_floats,
        make_part,
    )


class GroupedProducts(RowProducts):
    """Rows times one weight in panels of few bits, group by group."""

    def __init__(self, panels: Panels, grouping: Grouping) -> None:
        super().__init__(panels, panels.num_inputs, grouping.multiplying)
        self._grouping = grouping

    def _rows(self, x_RK: Numbers, num_threads: int) -> tuple[Records, Numbers]:
        """Return the records of rows, and the rows in float32; threads share many rows."""
        _, record_bytes, is_widened, make_part = self._grouping
        wide_RK: Any = np.empty(x_RK.shape, np.float32) if is_widened else x_RK
        records_RB = np.empty((len(x_RK), record_bytes(x_RK.shape[1])), np.uint8)
        parts = even_shares(len(x_RK), 1, num_threads if len(x_RK) >= _ROWS_TO_SHARE else 1)
        run_shares(make_part, parts, x_RK, wide_RK, records_RB)
        return records_RB, wide_RK
