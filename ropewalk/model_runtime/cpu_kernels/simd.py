"""A SIMD register of float32 values for numba, with operations that keep it in a register.

numba compiles a loop that sums into an array as loads and stores of that array. A `Lanes` value is
one SIMD register of WIDTH values: 16 with AVX-512, 8 with AVX2, 4 with NEON (`target.py`).

Every operation below is one instruction on it, in the order written. Nothing is reassociated, so
results do not depend on the code around an operation. Sums over lanes do depend on WIDTH, so two
kinds of processors may differ in the last bit.

Arrays are contiguous. `at` counts elements from the array's first, whatever its shape. uint16
arrays hold bfloat16 as its bits. Loads widen them, and stores round to nearest even. int8 arrays
are loaded only.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from ropewalk.model_runtime.cpu_kernels.target import target_features, vectors

WIDTH = vectors().lanes

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_LANES, _INT_LANES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)
HALVES = ir.VectorType(ir.IntType(16), WIDTH)


class Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


class LanesType(types.Type):  # type: ignore[misc]
    """numba's type of a `Lanes` value."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _LANES)


def _operation(emit: Callable[..., Any], *, arguments: int, returns: Any = LANES) -> Any:
    """Build an intrinsic on Lanes from `emit`; numba needs a fixed count of arguments."""

    def typed(*kinds: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return emit(builder, *values)

        return returns(*kinds), code

    signatures: dict[int, Callable[..., Any]] = {
        1: lambda typingctx, a: typed(a),  # noqa: ARG005
        2: lambda typingctx, a, b: typed(a, b),  # noqa: ARG005
        3: lambda typingctx, a, b, c: typed(a, b, c),  # noqa: ARG005
    }
    return intrinsic(signatures[arguments])


def emit_constant(number: float) -> Any:
    return ir.Constant(_LANES, [number] * WIDTH)


def _constant_int(number: int) -> Any:
    return ir.Constant(_INT_LANES, [number] * WIDTH)


def _called(builder: Any, name: str, returns: Any, *values: Any) -> Any:
    kind = ir.FunctionType(returns, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, values)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c, rounded once; rounded twice on a processor without such an instruction."""
    if not vectors().has_fma:
        return builder.fadd(builder.fmul(a, b), c)  # LLVM would call a function for each lane
    return _called(builder, f"llvm.fma.v{WIDTH}f32", _LANES, a, b, c)


def emit_broadcast(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LANES, ir.Undefined), number, ir.Constant(_INT, 0))
    zeros = ir.Constant(_INT_LANES, [0] * WIDTH)
    return builder.shuffle_vector(first, ir.Constant(_LANES, ir.Undefined), zeros)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    # This form compiles to one instruction. LLVM's own maximum handles NaN and takes four.
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _where_negative(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, emit_constant(0.0)), b, c)


def _reduce_max(builder: Any, lanes: Any) -> Any:
    distance = WIDTH // 2
    while distance:
        order = ir.Constant(_INT_LANES, [lane ^ distance for lane in range(WIDTH)])
        lanes = _maximum(builder, lanes, builder.shuffle_vector(lanes, lanes, order))
        distance //= 2
    return builder.extract_element(lanes, ir.Constant(_INT, 0))


def _any_above(builder: Any, a: Any, b: Any) -> Any:
    found = builder.bitcast(builder.fcmp_ordered(">", a, b), ir.IntType(WIDTH))
    return builder.icmp_unsigned("!=", found, ir.Constant(ir.IntType(WIDTH), 0))


def _reduce_add(builder: Any, lanes: Any) -> Any:
    """Emit the sum of the lanes, in their order."""
    start = ir.Constant(_FLOAT, -0.0)
    return _called(builder, f"llvm.vector.reduce.fadd.v{WIDTH}f32", _FLOAT, start, lanes)


# exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. ln 2 is in two parts, so that r is
# exact to float32. With Taylor terms to the sixth, the relative error is below 2e-7 if exp(x) is
# a normal number.
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LEAST = -87.0  # exp of smaller values is 0 here


def _exp(builder: Any, x: Any) -> Any:
    shifted = emit_fma(builder, x, emit_constant(_LOG2_E), emit_constant(_ROUND))
    whole = builder.fsub(shifted, emit_constant(_ROUND))
    rest = emit_fma(builder, whole, emit_constant(-_LN2_HIGH), x)
    rest = emit_fma(builder, whole, emit_constant(-_LN2_LOW), rest)
    power = emit_constant(_TERMS[0])
    for term in _TERMS[1:]:
        power = emit_fma(builder, power, rest, emit_constant(term))
    exponent = builder.shl(builder.bitcast(shifted, _INT_LANES), _constant_int(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(power, _INT_LANES), exponent), _LANES)
    is_small = builder.fcmp_ordered("<", x, emit_constant(_LEAST))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, x, builder.select(is_small, emit_constant(0.0), scaled))


fma = _operation(emit_fma, arguments=3)  # a * b + c, rounded once
where_negative = _operation(_where_negative, arguments=3)  # b where a < 0, else c
add = _operation(lambda builder, a, b: builder.fadd(a, b), arguments=2)
subtract = _operation(lambda builder, a, b: builder.fsub(a, b), arguments=2)
multiply = _operation(lambda builder, a, b: builder.fmul(a, b), arguments=2)
divide = _operation(lambda builder, a, b: builder.fdiv(a, b), arguments=2)
maximum = _operation(_maximum, arguments=2)  # b if either is NaN
broadcast = _operation(emit_broadcast, arguments=1)  # a float32 in every lane
exp = _operation(_exp, arguments=1)  # for x up to 87; NaN stays NaN
reduce_max = _operation(_reduce_max, arguments=1, returns=types.float32)  # undefined if any is NaN
any_above = _operation(_any_above, arguments=2, returns=types.boolean)  # a > b in any lane
reduce_add = _operation(_reduce_add, arguments=1, returns=types.float32)


_BYTES = ir.VectorType(ir.IntType(8), WIDTH)


def emit_load(builder: Any, array: Any, pointer: Any) -> Any:
    """Emit a load of WIDTH elements from an address; `array` is the array's numba type."""
    if array.dtype == types.int8:
        codes = builder.load(builder.bitcast(pointer, _BYTES.as_pointer()), align=1)
        return builder.sitofp(builder.sext(codes, _INT_LANES), _LANES)
    if array.dtype != types.uint16:
        return builder.load(builder.bitcast(pointer, _LANES.as_pointer()), align=4)
    loaded = builder.load(builder.bitcast(pointer, HALVES.as_pointer()), align=2)
    wide = builder.zext(loaded, _INT_LANES)
    return builder.bitcast(builder.shl(wide, _constant_int(16)), _LANES)


def emit_rounded(builder: Any, lanes: Any) -> Any:
    """Emit the rounding of Lanes to the bits of bfloat16; one instruction with AVX512_BF16."""
    if "avx512bf16" in target_features():
        rounded = builder.fptrunc(lanes, ir.VectorType(Bfloat(), WIDTH))
        return builder.bitcast(rounded, HALVES)
    bits = builder.bitcast(lanes, _INT_LANES)
    upper = builder.lshr(bits, _constant_int(16))
    odd = builder.and_(upper, _constant_int(1))
    even = builder.lshr(
        builder.add(builder.add(bits, _constant_int(0x7FFF)), odd), _constant_int(16)
    )
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    quiet = builder.or_(upper, _constant_int(0x40))
    return builder.trunc(builder.select(is_nan, quiet, even), HALVES)


def emit_store(builder: Any, array: Any, pointer: Any, lanes: Any) -> None:
    """Emit a store of WIDTH elements at an address; `array` is the array's numba type."""
    if array.dtype == types.uint16:
        rounded = emit_rounded(builder, lanes)
        builder.store(rounded, builder.bitcast(pointer, HALVES.as_pointer()), align=2)
    else:
        builder.store(lanes, builder.bitcast(pointer, _LANES.as_pointer()), align=4)


def address_of(context: Any, builder: Any, array: Any, memory: Any, at: Any) -> Any:
    struct = context.make_array(array)(context, builder, memory)
    return builder.gep(struct.data, [at])


@intrinsic  # type: ignore[untyped-decorator]
def load(typingctx: Any, array: Any, at: Any) -> Any:  # noqa: ARG001
    """Load WIDTH elements of `array` from `at` on."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_load(builder, array, address_of(context, builder, array, *values))

    return LANES(array, at), code


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, array: Any, at: Any, lanes: Any) -> Any:  # noqa: ARG001
    """Store WIDTH elements in `array` from `at` on."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        emit_store(builder, array, address_of(context, builder, array, *values[:2]), values[2])
        return context.get_dummy_value()

    return types.none(array, at, lanes), code


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, array: Any, at: Any) -> Any:  # noqa: ARG001
    """Prefetch the cache line of element `at` of `array`."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, array, *values)
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        to_read, second_level, data = (ir.Constant(_INT, number) for number in (0, 2, 1))
        builder.call(function, [pointer, to_read, second_level, data])
        return context.get_dummy_value()

    return types.none(array, at), code


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typingctx: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Convert an address to a pointer to elements of the array `like`."""
    kind = types.CPointer(like.dtype)

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return kind(address, like), code
