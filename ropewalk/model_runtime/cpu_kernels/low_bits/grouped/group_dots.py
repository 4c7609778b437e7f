"""Intrinsics for numba that multiply rows by a group of inputs of weights in few bits.

The products of a group with a rounded row are summed in integers, exactly. The sum becomes float32,
which is exact, too, and is multiplied by the product of both scales, and added to the sums of the
groups before. Formats with minima then add the offset times the scaled sum of the row's codes. No
operation is fused with another, so every processor finds the same bits.

The products with a bfloat16 row are summed in pairs, in float32. That sum times the scale is added,
and the offset times the sum of the row's numbers, with one rounding each.

`few_rows_adder` takes few rows, and keeps the bytes of weights in registers. `group_adder` takes
tiles of rows over a chunk that `byte_codes.py` has unpacked.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.attention.bf16_dot import emit_pair_products
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.byte_codes import AHEAD_BYTES, QUAD, emit_codes
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.integer_dot import INTS, emit_dots
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.rounded_rows import Records
from ropewalk.model_runtime.cpu_kernels.low_bits.groups import group_beginner
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import further
from ropewalk.model_runtime.cpu_kernels.low_bits.unpack import unpacking
from ropewalk.model_runtime.cpu_kernels.register_sums import load_sums, steps, store_sums
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    address_of,
    emit_broadcast,
    emit_constant,
    emit_fma,
    emit_load,
)

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_FEW_COLUMNS = 2  # registers of outputs beside each other, for more than one row


class Dots(NamedTuple):
    """How the products of a group are summed: in integers, or in pairs of bfloat16."""

    shorts: int = 0  # of integers (`num_shorts` in integer_dot.py)
    in_pairs: bool = False

    @property
    def code_bytes(self) -> int:
        """Return the bytes of an input, in a record and in a chunk of a panel."""
        return 2 if self.in_pairs else 1

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a group's sums in a record."""
        return 4 if self.in_pairs else 8

    def __str__(self) -> str:
        return "pairs" if self.in_pairs else str(self.shorts)


def _lanes(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(INTS, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * WIDTH))


class _Rows:
    """The loads of one number from each of several records."""

    def __init__(
        self, context: Any, builder: Any, array: Any, memory: Any, stride: Any, num_rows: int
    ) -> None:
        """`stride`: the distance of a row's record to the next."""
        self._context, self._builder, self._array, self._memory = context, builder, array, memory
        self._strides = [builder.mul(stride, stride.type(row)) for row in range(num_rows)]

    def load(self, place: Any, distance: int, kind: Any) -> list[Any]:
        builder, found = self._builder, []
        for stride in self._strides:
            at = builder.add(further(builder, place, distance), stride)
            pointer = address_of(self._context, builder, self._array, self._memory, at)
            found.append(builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1))
        return found

    def starts(
        self, sum_at: Any, zero: Any, num_columns: int, dots: Dots, *, has_minimum: int
    ) -> list[Any]:
        """Emit the sums to which products are added: they take the zero from all bytes.

        In a format with minima, and in pairs, the zero is 0.
        """
        if dots.in_pairs:
            return [emit_constant(0.0)] * (len(self._strides) * num_columns)
        if has_minimum:
            return [ir.Constant(INTS, [0] * WIDTH)] * (len(self._strides) * num_columns)
        minus = self._builder.neg(self._builder.trunc(zero, _INT))
        rows = [self._builder.mul(each, minus) for each in self.load(sum_at, 0, _INT)]
        return [_lanes(self._builder, row) for row in rows for _ in range(num_columns)]

    def codes(self, codes_at: Any, quad: int) -> list[Any]:
        return [_lanes(self._builder, each) for each in self.load(codes_at, quad * QUAD, _INT)]


def _dots(
    builder: Any, starts: list[Any], group: int, kind: Dots,
    weights_at: Callable[[int], list[Any]], rows_at: Callable[[int], list[Any]],
) -> list[Any]:  # fmt: skip
    """Emit the sums of a tile, to which the products of a group are added."""
    num_lanes = group * kind.code_bytes // QUAD
    if not kind.in_pairs:
        return emit_dots(builder, starts, num_lanes, kind.shorts, weights_at, rows_at)
    sums = starts
    for lane in range(num_lanes):
        weights, rows = weights_at(lane), rows_at(lane)
        pairs = [(row, weight) for row in rows for weight in weights]
        sums = [
            emit_pair_products(builder, before, *pair)
            for before, pair in zip(sums, pairs, strict=True)
        ]
    return sums


def _finished(
    builder: Any, rows: _Rows, places: tuple[Any, Any], before: Sequence[Any], dots: Sequence[Any],
    scales: Sequence[Any], offsets: Sequence[Any], kind: Dots,
) -> list[Any]:  # fmt: skip
    """Emit the sums of a tile, to which those of a group are added.

    `places` of the row's scale and sums. `offsets` are empty in formats without minima.
    """
    scale_at, sum_at = places
    if not kind.in_pairs:
        after = _scaled(builder, before, dots, scales, rows.load(scale_at, 0, _FLOAT))
        if offsets:
            after = _offset(builder, after, offsets, rows.load(sum_at, 4, _FLOAT))
        return after
    factors = list(scales) * (len(dots) // len(scales))
    after = [
        emit_fma(builder, dot, scale, each)
        for each, dot, scale in zip(before, dots, factors, strict=True)
    ]
    if not offsets:
        return after
    sums = [emit_broadcast(builder, each) for each in rows.load(sum_at, 0, _FLOAT)]
    pairs = [(row, offset) for row in sums for offset in offsets]
    return [emit_fma(builder, *pair, each) for each, pair in zip(after, pairs, strict=True)]


def _scaled(
    builder: Any, before: Sequence[Any], dots: Sequence[Any], scales: Sequence[Any],
    row_scales: Sequence[Any],
) -> list[Any]:  # fmt: skip
    """Emit the sums of a tile, to which integers times both scales are added."""
    both = [
        builder.fmul(each, emit_broadcast(builder, row)) for row in row_scales for each in scales
    ]
    return [
        builder.fadd(each, builder.fmul(builder.sitofp(dot, scale.type), scale))
        for each, dot, scale in zip(before, dots, both, strict=True)
    ]


def _offset(
    builder: Any, before: Sequence[Any], offsets: Sequence[Any], row_sums: Sequence[Any]
) -> list[Any]:
    """Emit the sums of a tile, to which offsets times the rows' scaled sums are added."""
    rows = [emit_broadcast(builder, each) for each in row_sums]
    added = [builder.fmul(each, row) for row in rows for each in offsets]
    return [builder.fadd(*two) for two in zip(before, added, strict=True)]


@cache
def group_adder(group: int, has_minimum: int, dots_of: Dots) -> Any:
    """Return an intrinsic that adds the products of one group of inputs to a tile of sums."""

    def add_group(
        typingctx: Any,  # noqa: ARG001
        sums: Any, records: Any, codes_at: Any, scale_at: Any, sum_at: Any, stride: Any, zero: Any,
        weights: Any, weights_at: Any, scales: Any, scales_at: Any, offsets: Any, columns: Any,
    ) -> Any:  # fmt: skip
        num_columns = columns.literal_value

        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            tile, record, codes_at, scale_at, sum_at, stride, zero = values[:7]
            bytes_memory, bytes_at, scale_memory, scales_at, offset_memory = values[7:12]
            rows = _Rows(context, builder, records, record, stride, sums.count // num_columns)

            def quads(quad: int) -> list[Any]:
                at = further(builder, bytes_at, quad * PANEL * QUAD)
                places = steps(builder, at, WIDTH * QUAD, num_columns)
                found = [
                    address_of(context, builder, weights, bytes_memory, place) for place in places
                ]
                return [
                    builder.load(builder.bitcast(each, INTS.as_pointer()), align=1)
                    for each in found
                ]

            def floats(array: Any, memory: Any) -> list[Any]:
                return [
                    emit_load(builder, array, address_of(context, builder, array, memory, place))
                    for place in steps(builder, scales_at, WIDTH, num_columns)
                ]

            starts = rows.starts(sum_at, zero, num_columns, dots_of, has_minimum=has_minimum)
            dots = _dots(
                builder, starts, group, dots_of, quads, lambda quad: rows.codes(codes_at, quad)
            )
            after = _finished(
                builder, rows, (scale_at, sum_at), cgutils.unpack_tuple(builder, tile), dots,
                floats(scales, scale_memory),
                floats(offsets, offset_memory) if has_minimum else [], dots_of,
            )  # fmt: skip
            return context.make_tuple(builder, sums, after)

        arguments = (
            sums, records, codes_at, scale_at, sum_at, stride, zero, weights, weights_at, scales,
            scales_at, offsets, columns,
        )  # fmt: skip
        return sums(*arguments), code

    # The cache tells them apart by name.
    add_group.__name__ = f"add_group_{group}_{has_minimum}_{dots_of}"
    return intrinsic(prefer_literal=True)(add_group)


@cache
def _few_rows_group_adder(kind: Format, dots_of: Dots, num_rows: int) -> Any:
    """Return an intrinsic that adds the products of few rows with a group to a tile of sums."""

    def add_rows(
        typingctx: Any,  # noqa: ARG001
        sums: Any, records: Any, codes_at: Any, scale_at: Any, sum_at: Any, stride: Any, zero: Any,
        at: Any, above: Any, scales: Any, offsets: Any,
    ) -> Any:  # fmt: skip
        num_columns = sums.count // num_rows

        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            tile, record, codes_at, scale_at, sum_at, stride, zero, at, above, *factors = values
            own, lower = (cgutils.unpack_tuple(builder, each) for each in factors)
            rows = _Rows(context, builder, records, record, stride, num_rows)
            columns = [
                emit_codes(
                    kind,
                    builder,
                    further(builder, at, column * WIDTH * kind.unit_bytes),
                    further(builder, above, column * WIDTH * kind.upper_word_bytes),
                    in_pairs=dots_of.in_pairs,
                )
                for column in range(num_columns)
            ]
            starts = rows.starts(sum_at, zero, num_columns, dots_of, has_minimum=kind.has_minimum)
            dots = _dots(
                builder, starts, kind.group, dots_of,
                lambda _: [next(each) for each in columns],
                lambda quad: rows.codes(codes_at, quad),
            )  # fmt: skip
            after = _finished(
                builder, rows, (scale_at, sum_at), cgutils.unpack_tuple(builder, tile), dots, own,
                lower if kind.has_minimum else [], dots_of,
            )  # fmt: skip
            return context.make_tuple(builder, sums, after)

        arguments = (
            sums, records, codes_at, scale_at, sum_at, stride, zero, at, above, scales, offsets,
        )  # fmt: skip
        return sums(*arguments), code

    # The cache tells them apart by name.
    add_rows.__name__ = f"add_rows_{kind.name}_{dots_of}_{num_rows}"
    return intrinsic(add_rows)


@cache
def few_rows_adder(kind: Format, dots: Dots, num_rows: int) -> Any:
    """Compiled: add(panel, first, end, records, codes_at, scales_at, sums_at, zero, sums, row).

    It adds the products of `num_rows` rows with inputs `first` to `end` - 1 of the panel at an
    address to `sums`, [R, 64], from `row` on. The places are those of input `first` in the first
    row's record.
    """
    width, _, scales_of, offsets_of, *_ = unpacking(kind, 0 if num_rows == 1 else _FEW_COLUMNS)
    add_group = _few_rows_group_adder(kind, dots, num_rows)
    begin_group, group = group_beginner(kind, AHEAD_BYTES), kind.group
    scale_bytes, upper_bytes = kind.scale_bytes, kind.upper_bytes
    column_bytes, above_bytes = kind.unit_bytes, kind.upper_word_bytes
    columns, has_minimum = width // WIDTH, int(kind.has_minimum)
    code_bytes, sum_bytes = dots.code_bytes, dots.sum_bytes

    @jit(borrows=True, fuses=False, apart=True)
    def add_rows(
        panel: int, first: int, end: int, records_RB: Records, codes_at: int, scales_at: int,
        sums_at: int, zero: int, sums: Floats, row: int,
    ) -> None:  # fmt: skip
        stride = records_RB.shape[1]
        for start in range(first, end, group):
            head, factors_at = begin_group(panel, start)
            inside = start - first
            for column in range(0, PANEL, width):
                scales = scales_of(head, factors_at, column)
                offsets = scales
                if has_minimum:
                    offsets = offsets_of(head, factors_at, column, scales)
                place = row * PANEL + column
                tile = load_sums(sums, place, PANEL, num_rows, columns)
                tile = add_group(
                    tile, records_RB, codes_at + inside * code_bytes, scales_at + inside // 32 * 4,
                    sums_at + inside // group * sum_bytes, stride, zero,
                    factors_at + scale_bytes + upper_bytes + column_bytes * column,
                    factors_at + scale_bytes + above_bytes * column, scales, offsets,
                )  # fmt: skip
                store_sums(sums, place, PANEL, tile, columns)

    return add_rows
