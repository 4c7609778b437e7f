"""Rows of activations rounded to eight bits, a scale for each 32 inputs.

This is the rule of ggml's Q8_0, but that the scale stays float32: the largest magnitude of a group
divided by 127. Numbers are multiplied by 127 over that magnitude and rounded to the nearest
integer, the even one of two. A group with NaN or infinity has the scale NaN. In a group whose
magnitudes are all below 2^-100, every number is 0. Each operation is rounded as IEEE 754 says, so
all processors find the same bits.

A record holds one rounded row: its codes, in one or both of two orders; the scale of each group;
then for each 32 inputs, and for each 16, the sum of the codes, and that sum times the scale.

The orders are those in which words of few bits give their inputs (`byte_codes.py`).

Shapes: R = rows, K = inputs, B = bytes of a record.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.integer_dot import INTS, MOST_CODE
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    address_of,
    emit_broadcast,
    emit_constant,
    emit_load,
)

GROUP, HALF = 32, 16  # inputs
# The inputs of a group whose codes lie one after the other: from words of eight, of sixteen inputs.
ORDERS = tuple(
    tuple(
        first + step * each + begin
        for first in range(0, GROUP, size)
        for begin in range(step)
        for each in range(4)
    )
    for size, step in ((8, 2), (16, 4))
)
_SUM_BYTES = 8  # an int32, and a float32
_LINE_BYTES = 64
_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_MAGNITUDE, _INFINITY = 0x7FFF_FFFF, 0x7F80_0000
_LEAST = (127 - 100) << 23  # the bits of 2^-100
_ROUND, _ROUND_BITS = 12582912.0, 0x4B40_0000  # 1.5 * 2^23, as in simd.py

Records = NDArray[np.uint8]


class Places(NamedTuple):
    """The first bytes of a record's parts."""

    scales: int
    sums: int  # of 32 inputs
    half_sums: int  # of 16
    num_bytes: int


@jit(inline=True)
def places_of(num_inputs: int, num_orders: int, in_pairs: int = 0) -> Places:
    """Return the places of a record. `in_pairs`: it is one of `paired_rows.py`, without scales."""
    scales = num_orders * num_inputs * (2 if in_pairs else 1)
    sums = scales + (0 if in_pairs else num_inputs // GROUP * 4)
    sum_bytes = 4 if in_pairs else _SUM_BYTES
    half_sums = sums + num_inputs // GROUP * sum_bytes
    end = half_sums + num_inputs // HALF * sum_bytes
    return Places(scales, sums, half_sums, -(-end // _LINE_BYTES) * _LINE_BYTES)


def _called(builder: Any, name: str, returns: Any, *values: Any) -> Any:
    kind = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _largest(builder: Any, numbers: list[Any]) -> Any:
    """Emit the bits of the largest magnitude; those of NaN and infinity are the largest."""
    mask = ir.Constant(INTS, [_MAGNITUDE] * WIDTH)
    found = None
    for each in numbers:
        bits = builder.and_(builder.bitcast(each, INTS), mask)
        if found is None:
            found = bits
        else:
            found = builder.select(builder.icmp_signed(">", bits, found), bits, found)
    return _called(builder, f"llvm.vector.reduce.smax.v{WIDTH}i32", _INT, found)


def _codes(builder: Any, numbers: list[Any], inverse: Any, keep: Any) -> list[Any]:
    """Emit the codes of a group, as registers of integers."""
    many, found = emit_broadcast(builder, inverse), []
    kept = builder.insert_element(ir.Constant(INTS, ir.Undefined), keep, _INT(0))
    kept = builder.shuffle_vector(kept, kept, ir.Constant(INTS, [0] * WIDTH))
    for each in numbers:
        finite = builder.bitcast(builder.and_(builder.bitcast(each, INTS), kept), each.type)
        shifted = builder.fadd(builder.fmul(finite, many), emit_constant(_ROUND))
        bits = builder.bitcast(shifted, INTS)
        found.append(builder.sub(bits, ir.Constant(INTS, [_ROUND_BITS] * WIDTH)))
    return found


def joined(builder: Any, parts: list[Any]) -> Any:
    """Emit one vector of several equal ones."""
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(_INT, size), list(range(size)))
        parts = [
            builder.shuffle_vector(*parts[at : at + 2], order) for at in range(0, len(parts), 2)
        ]
    return parts[0]


def _sum(builder: Any, codes: list[Any]) -> Any:
    total = codes[0]
    for each in codes[1:]:
        total = builder.add(total, each)
    return _called(builder, f"llvm.vector.reduce.add.v{WIDTH}i32", _INT, total)


@cache
def _group_rounder(num_orders: int) -> Any:
    """Return an intrinsic that rounds one group of 32 inputs."""

    def round_group(
        typingctx: Any, numbers: Any, at: Any, out: Any,  # noqa: ARG001
        codes_at: Any, order_bytes: Any, scale_at: Any, sum_at: Any, halves_at: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            memory, first, record, codes_at, order_bytes, scale_at, sum_at, halves_at = values

            def put(value: Any, place: Any) -> None:
                pointer = address_of(context, builder, out, record, place)
                builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=1)

            loaded = [
                emit_load(
                    builder,
                    numbers,
                    address_of(
                        context, builder, numbers, memory, builder.add(first, first.type(step))
                    ),
                )
                for step in range(0, GROUP, WIDTH)
            ]
            bits = _largest(builder, loaded)
            is_wrong = builder.icmp_signed(">=", bits, _INT(_INFINITY))
            is_small = builder.icmp_signed("<", bits, _INT(_LEAST))
            largest = builder.bitcast(bits, _FLOAT)
            most, zero = _FLOAT(float(MOST_CODE)), _FLOAT(0.0)
            scale = builder.select(is_small, zero, builder.fdiv(largest, most))
            scale = builder.select(is_wrong, _FLOAT(float("nan")), scale)
            is_none = builder.or_(is_small, is_wrong)
            inverse = builder.select(is_none, zero, builder.fdiv(most, largest))
            keep = builder.select(is_wrong, _INT(0), _INT(-1))
            found = _codes(builder, loaded, inverse, keep)
            bytes_32 = joined(
                builder,
                [builder.trunc(each, ir.VectorType(ir.IntType(8), WIDTH)) for each in found],
            )
            for index in range(num_orders):
                order = ir.Constant(ir.VectorType(_INT, GROUP), list(ORDERS[index]))
                place = builder.add(codes_at, builder.mul(order_bytes, order_bytes.type(index)))
                put(builder.shuffle_vector(bytes_32, bytes_32, order), place)
            put(scale, scale_at)
            half = len(found) // 2
            sums = [_sum(builder, found[:half]), _sum(builder, found[half:])]
            places = [(halves_at, 0), (halves_at, _SUM_BYTES), (sum_at, 0)]
            for number, (place, further) in zip([*sums, builder.add(*sums)], places, strict=True):
                place = builder.add(place, place.type(further))  # noqa: PLW2901
                put(number, place)
                scaled = builder.fmul(builder.sitofp(number, _FLOAT), scale)
                put(scaled, builder.add(place, place.type(4)))
            return context.get_dummy_value()

        arguments = (numbers, at, out, codes_at, order_bytes, scale_at, sum_at, halves_at)
        return types.none(*arguments), code

    round_group.__name__ = f"round_group_{num_orders}"  # the cache tells them apart by name
    return intrinsic(round_group)


class RowMaker(NamedTuple):
    """The compiled functions that make records of rows of one number type."""

    rows: Any  # (x_RK) -> records [R, B], and the rows in float32
    part: Any  # (x_RK, wide_RK, records_RB, first, end): the same for some rows


def row_maker(make_part: Any, num_orders: int, in_pairs: int, is_widened: int) -> RowMaker:
    """Return the functions that make records by `make_part`, of some or of all rows.

    `is_widened`: rows in float32 are made beside the records. Otherwise the rows themselves take
    their place.
    """

    @jit()
    def make_rows(x_RK: Numbers) -> tuple[Records, Numbers]:
        num_rows, num_inputs = x_RK.shape
        wide_RK: Any = x_RK
        if is_widened:
            wide_RK = np.empty((num_rows, num_inputs), np.float32)
        num_bytes = places_of(num_inputs, num_orders, in_pairs).num_bytes
        records_RB = np.empty((num_rows, num_bytes), np.uint8)
        make_part(x_RK, wide_RK, records_RB, 0, num_rows)
        return records_RB, wide_RK

    return RowMaker(make_rows, make_part)


@cache
def rounder(num_orders: int, is_bfloat16: int) -> RowMaker:
    """Return the functions for rows of float32, or of bfloat16's bits. K is a multiple of 32.

    Rows of float32 are their own copy in float32.
    """
    round_group = _group_rounder(num_orders)

    @jit(fuses=False, apart=True)
    def round_part(
        x_RK: Numbers, wide_RK: Floats, records_RB: Records, first: int, end: int
    ) -> None:
        num_inputs = wide_RK.shape[1]
        places = places_of(num_inputs, num_orders)
        for row in range(first, end):
            if is_bfloat16:
                widen(x_RK[row], wide_RK[row])
            record = row * places.num_bytes
            for start in range(0, num_inputs, GROUP):
                group = start // GROUP
                round_group(
                    wide_RK, row * num_inputs + start, records_RB, record + start, num_inputs,
                    record + places.scales + 4 * group, record + places.sums + 8 * group,
                    record + places.half_sums + 16 * group,
                )  # fmt: skip

    return row_maker(round_part, num_orders, 0, is_bfloat16)
