"""Products of bfloat16 pairs on processors with AVX512_BF16, for numba.

One instruction multiplies sixteen pairs of values and adds both products of each pair to a float32
sum. That is twice the products of a float32 instruction. The instruction rounds in its own way, and
takes values below 2^-126 for zero. These functions compile only if HAS_PAIR_PRODUCTS is true.

uint16 arrays hold bfloat16 as its bits; the two values of a pair lie side by side.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.register_sums import factor_places, steps
from ropewalk.model_runtime.cpu_kernels.simd import (
    HALVES,
    LANES,
    WIDTH,
    Bfloat,
    address_of,
    emit_rounded,
)
from ropewalk.model_runtime.cpu_kernels.target import target_features

HAS_PAIR_PRODUCTS = {"avx512bf16", "avx512vl"} <= target_features()
FIRST, SECOND = 0x0000_FFFF, 0xFFFF_0000  # masks of a pair's bits that keep one of its values


_INT = ir.IntType(32)
_PAIRS, _BFLOATS = ir.VectorType(_INT, WIDTH), ir.VectorType(Bfloat(), 2 * WIDTH)
_BOTH = ir.VectorType(ir.IntType(16), 2 * WIDTH)
_BY_TURNS = ir.Constant(
    ir.VectorType(_INT, 2 * WIDTH),
    [half * WIDTH + lane for lane in range(WIDTH) for half in (0, 1)],
)


def emit_pair_products(builder: Any, sums: Any, factors: Any, numbers: Any) -> Any:
    """Emit the products of sixteen pairs, added to sixteen sums."""
    values = sums, builder.bitcast(factors, _BFLOATS), builder.bitcast(numbers, _BFLOATS)
    kind = ir.FunctionType(sums.type, [value.type for value in values])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _loaded(builder: Any, address: Any) -> Any:
    return builder.load(builder.bitcast(address, _PAIRS.as_pointer()), align=2)


def emit_pair_broadcast(builder: Any, address: Any) -> Any:
    """Emit a load of one pair for all lanes."""
    pair = builder.load(builder.bitcast(address, _INT.as_pointer()), align=2)
    first = builder.insert_element(ir.Constant(_PAIRS, ir.Undefined), pair, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(_PAIRS, [0] * WIDTH))


def emit_pair_store(builder: Any, address: Any, pairs: Any) -> None:
    builder.store(pairs, builder.bitcast(address, _BOTH.as_pointer()), align=2)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_pair_products(
    typingctx: Any,  # noqa: ARG001
    sums: Any, factors: Any, factor: Any, stride: Any, numbers: Any, number: Any, columns: Any,
) -> Any:  # fmt: skip
    """Add two factors of each row, times pairs of numbers, to the row's sums.

    Like `add_products`, but a register of numbers holds sixteen pairs. Each pair
    holds the first factor's number, then the second factor's.
    """
    num_columns = columns.literal_value

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        loaded = [
            _loaded(builder, address_of(context, builder, numbers, values[4], place))
            for place in steps(builder, values[5], 2 * WIDTH, num_columns)
        ]
        places = factor_places(context, builder, factors, values, sums.count // num_columns)
        before = cgutils.unpack_tuple(builder, values[0])
        after = [
            emit_pair_products(builder, before[r * num_columns + c], row, loaded[c])
            for r, row in enumerate(emit_pair_broadcast(builder, place) for place in places)
            for c in range(num_columns)
        ]
        return context.make_tuple(builder, sums, after)

    return sums(sums, factors, factor, stride, numbers, number, columns), code


@intrinsic  # type: ignore[untyped-decorator]
def add_half_products(
    typingctx: Any,  # noqa: ARG001
    sums: Any, factors: Any, factor: Any, numbers: Any, number: Any, keep: Any,
) -> Any:  # fmt: skip
    """Add a row's factor times one number of each pair to one register of sums (Lanes).

    `keep` is FIRST or SECOND. The other number counts as 0, even if it is NaN.
    """

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        row = emit_pair_broadcast(builder, address_of(context, builder, factors, *values[1:3]))
        pairs = _loaded(builder, address_of(context, builder, numbers, *values[3:5]))
        bits = builder.insert_element(
            ir.Constant(_PAIRS, ir.Undefined), builder.trunc(values[5], _INT), _INT(0)
        )
        bits = builder.shuffle_vector(bits, bits, ir.Constant(_PAIRS, [0] * WIDTH))
        return emit_pair_products(builder, values[0], row, builder.and_(pairs, bits))

    return LANES(sums, factors, factor, numbers, number, keep), code


@intrinsic  # type: ignore[untyped-decorator]
def store_pairs(typingctx: Any, array: Any, at: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
    """Round two Lanes and store them in a uint16 array as pairs, from element `at` on."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rows = [emit_rounded(builder, lanes) for lanes in values[2:]]
        _store_by_turns(builder, address_of(context, builder, array, *values[:2]), rows)
        return context.get_dummy_value()

    return types.none(array, at, first, second), code


@intrinsic  # type: ignore[untyped-decorator]
def copy_as_pairs(
    typingctx: Any, array: Any, at: Any, source: Any, first: Any, second: Any  # noqa: ARG001
) -> Any:  # fmt: skip
    """Store sixteen elements of `source` from `first`, and from `second`, as pairs; all uint16."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        places = [address_of(context, builder, source, values[2], place) for place in values[3:]]
        rows = [
            builder.load(builder.bitcast(place, HALVES.as_pointer()), align=2) for place in places
        ]
        _store_by_turns(builder, address_of(context, builder, array, *values[:2]), rows)
        return context.get_dummy_value()

    return types.none(array, at, source, first, second), code


def _store_by_turns(builder: Any, address: Any, rows: list[Any]) -> None:
    emit_pair_store(builder, address, builder.shuffle_vector(*rows, _BY_TURNS))
