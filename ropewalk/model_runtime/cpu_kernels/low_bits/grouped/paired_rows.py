"""Rows of bfloat16 in the order of pairs of codes, with the sums of their groups.

A record holds one row: its numbers, in one or both of two orders; then for each 32 inputs, and for
each 16, their sum in float32, for formats with minima. No number is rounded.

The orders are those in which `pair_codes.py` gives the inputs.

Shapes: R = rows, K = inputs, B = bytes of a record.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.rounded_rows import (
    GROUP,
    HALF,
    Records,
    RowMaker,
    places_of,
    row_maker,
)
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, address_of, emit_load

# The inputs of a group in pairs: of words of eight inputs, of sixteen inputs.
ORDERS = tuple(
    tuple(
        first + j + half
        for first in range(0, GROUP, size)
        for j in range(size // 2)
        for half in (0, size // 2)
    )
    for size in (8, 16)
)
_INT = ir.IntType(32)
_NUMBERS = ir.VectorType(ir.IntType(16), GROUP)


def _sum(builder: Any, lanes: Any) -> Any:
    """Emit the sum of a register by halves."""
    distance = WIDTH // 2
    while distance:
        order = [lane ^ distance for lane in range(WIDTH)]
        order = ir.Constant(ir.VectorType(_INT, WIDTH), order)
        lanes = builder.fadd(lanes, builder.shuffle_vector(lanes, lanes, order))
        distance //= 2
    return builder.extract_element(lanes, _INT(0))


@cache
def _group_pairer(num_orders: int) -> Any:
    """Return an intrinsic that writes one group of 32 inputs."""

    def pair_group(
        typingctx: Any, numbers: Any, at: Any, out: Any,  # noqa: ARG001
        codes_at: Any, order_bytes: Any, sum_at: Any, halves_at: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            memory, first, record, codes_at, order_bytes, sum_at, halves_at = values

            def put(value: Any, place: Any) -> None:
                pointer = address_of(context, builder, out, record, place)
                builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=1)

            places = [
                address_of(context, builder, numbers, memory, builder.add(first, first.type(step)))
                for step in (0, HALF)
            ]
            both = builder.load(builder.bitcast(places[0], _NUMBERS.as_pointer()), align=2)
            for index in range(num_orders):
                order = ir.Constant(ir.VectorType(_INT, GROUP), list(ORDERS[index]))
                place = builder.add(codes_at, builder.mul(order_bytes, order_bytes.type(index)))
                put(builder.shuffle_vector(both, both, order), place)
            sums = [_sum(builder, emit_load(builder, numbers, place)) for place in places]
            put(sums[0], halves_at)
            put(sums[1], builder.add(halves_at, halves_at.type(4)))
            put(builder.fadd(*sums), sum_at)
            return context.get_dummy_value()

        arguments = (numbers, at, out, codes_at, order_bytes, sum_at, halves_at)
        return types.none(*arguments), code

    pair_group.__name__ = f"pair_group_{num_orders}"  # the cache tells them apart by name
    return intrinsic(pair_group)


@cache
def pairer(num_orders: int, is_widened: int) -> RowMaker:
    """Return the functions for rows of bfloat16's bits. K is a multiple of 32.

    `is_widened`: whether products read the rows in float32, too. Otherwise the rows themselves
    take their place.
    """
    pair_group = _group_pairer(num_orders)

    @jit(apart=True)
    def pair_part(
        x_RK: Numbers, wide_RK: Numbers, records_RB: Records, first: int, end: int
    ) -> None:
        num_inputs = x_RK.shape[1]
        places = places_of(num_inputs, num_orders, 1)
        for row in range(first, end):
            if is_widened:
                widen(x_RK[row], wide_RK[row])
            record = row * places.num_bytes
            for start in range(0, num_inputs, GROUP):
                group = start // GROUP
                pair_group(
                    x_RK, row * num_inputs + start, records_RB, record + 2 * start, 2 * num_inputs,
                    record + places.sums + 4 * group, record + places.half_sums + 8 * group,
                )  # fmt: skip

    return row_maker(pair_part, num_orders, 1, is_widened)
