"""Sums of several rows that stay in registers while a loop adds products to them, for numba.

A tile holds `rows` x `columns` Lanes (`simd.py`): `columns` neighbouring registers of each row.
One iteration of a loop loads one number per row and `columns` registers once, and adds all their
products. Every sum is a chain of its own, so its bits do not depend on the shape of the tile.

`rows` and `columns` must be constants when numba compiles: a literal in the call, or a variable
of an enclosing function.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.simd import (
    LANES,
    WIDTH,
    address_of,
    emit_broadcast,
    emit_constant,
    emit_fma,
    emit_load,
    emit_store,
)


def _tile(rows: Any, columns: Any) -> Any:
    return types.UniTuple(LANES, rows.literal_value * columns.literal_value)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def no_sums(typingctx: Any, rows: Any, columns: Any) -> Any:  # noqa: ARG001
    """Return a tile of zeros."""
    tile = _tile(rows, columns)

    def code(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        return context.make_tuple(builder, tile, [emit_constant(0.0)] * tile.count)

    return tile(rows, columns), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load_sums(
    typingctx: Any, array: Any, at: Any, stride: Any, rows: Any, columns: Any  # noqa: ARG001
) -> Any:  # fmt: skip
    """Load the tile that begins at element `at` of `array`; rows are `stride` elements apart."""
    tile = _tile(rows, columns)

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        places = _places(context, builder, array, values, tile, columns.literal_value)
        return context.make_tuple(builder, tile, [emit_load(builder, array, p) for p in places])

    return tile(array, at, stride, rows, columns), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_sums(
    typingctx: Any, array: Any, at: Any, stride: Any, sums: Any, columns: Any  # noqa: ARG001
) -> Any:  # fmt: skip
    """Store a tile at the place from which `load_sums` would load it."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        places = _places(context, builder, array, values, sums, columns.literal_value)
        for place, lanes in zip(places, cgutils.unpack_tuple(builder, values[3]), strict=True):
            emit_store(builder, array, place, lanes)
        return context.get_dummy_value()

    return types.none(array, at, stride, sums, columns), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_products(
    typingctx: Any,  # noqa: ARG001
    sums: Any, factors: Any, factor: Any, stride: Any, numbers: Any, number: Any, columns: Any,
) -> Any:  # fmt: skip
    """Add each row's factor times the same numbers to the row's sums.

    Row r's factor is element `factor + r * stride` of `factors`. The numbers are `columns`
    registers, from element `number` of `numbers` on.
    """
    num_columns = columns.literal_value

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        loaded = [
            emit_load(builder, numbers, address_of(context, builder, numbers, values[4], place))
            for place in steps(builder, values[5], WIDTH, num_columns)
        ]

        def broadcast(address: Any) -> Any:
            return emit_broadcast(builder, builder.load(address))

        places = factor_places(context, builder, factors, values, sums.count // num_columns)
        before = cgutils.unpack_tuple(builder, values[0])
        after = [
            emit_fma(builder, row, loaded[c], before[r * num_columns + c])
            for r, row in enumerate(map(broadcast, places))
            for c in range(num_columns)
        ]
        return context.make_tuple(builder, sums, after)

    return sums(sums, factors, factor, stride, numbers, number, columns), code


def factor_places(context: Any, builder: Any, array: Any, values: Any, num_rows: int) -> list[Any]:
    """Return the address of each row's factor; `values`: sums, factors, factor, stride, ..."""
    _, memory, place, stride = values[:4]
    addresses = []
    for r in range(num_rows):
        if r:
            place = builder.add(place, stride)
        addresses.append(address_of(context, builder, array, memory, place))
    return addresses


def steps(builder: Any, start: Any, step: int, count: int) -> list[Any]:
    """Return `count` values: start, start + step, ..."""
    return [builder.add(start, start.type(index * step)) for index in range(count)]


def _places(
    context: Any, builder: Any, array: Any, values: Any, tile: Any, num_columns: int
) -> list[Any]:
    """Return the address of every register of a tile, row by row."""
    memory, at, stride = values[:3]
    places = []
    for r in range(tile.count // num_columns):
        if r:
            at = builder.add(at, stride)
        places += [
            address_of(context, builder, array, memory, place)
            for place in steps(builder, at, WIDTH, num_columns)
        ]
    return places
