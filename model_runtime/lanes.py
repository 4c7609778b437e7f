"""Sixteen float32 numbers at once, for numba: what its own loops do not keep in registers.

numba compiles a loop that sums into an array as loads and stores of that array. A `Lanes` value is
one vector register (two or four, where registers are narrower), and every operation below is one
instruction on it, in the order written: nothing is reassociated, so results do not depend on what
stands around an operation.

Arrays are contiguous; `at` counts numbers from the array's first, whatever its shape. uint16 arrays
hold bfloat16 as its bits, and are widened as they are loaded.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

WIDTH = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_LANES, _INT_LANES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)


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
    """An intrinsic on Lanes from what it emits; numba asks for a fixed count of arguments."""

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


def _constant(number: float) -> Any:
    return ir.Constant(_LANES, [number] * WIDTH)


def _called(builder: Any, name: str, returns: Any, *values: Any) -> Any:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(returns, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, values)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _called(builder, f"llvm.fma.v{WIDTH}f32", _LANES, a, b, c)


def _spread(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LANES, ir.Undefined), number, ir.Constant(_INT, 0))
    zeros = ir.Constant(_INT_LANES, [0] * WIDTH)
    return builder.shuffle_vector(first, ir.Constant(_LANES, ir.Undefined), zeros)


def _largest(builder: Any, lanes: Any) -> Any:
    return _called(builder, f"llvm.vector.reduce.fmax.v{WIDTH}f32", _FLOAT, lanes)


def _total(builder: Any, lanes: Any) -> Any:
    """In order of the lanes."""
    start = ir.Constant(_FLOAT, -0.0)
    return _called(builder, f"llvm.vector.reduce.fadd.v{WIDTH}f32", _FLOAT, start, lanes)


# exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2; ln 2 in two parts, so that r is
# exact to float32; Taylor's terms to the sixth: relative error below 2e-7 where exp(x) is normal.
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LEAST = -87.0  # exp of less is 0 here


def _exp(builder: Any, x: Any) -> Any:
    shifted = _fma(builder, x, _constant(_LOG2_E), _constant(_ROUND))
    whole = builder.fsub(shifted, _constant(_ROUND))
    rest = _fma(builder, whole, _constant(-_LN2_HIGH), x)
    rest = _fma(builder, whole, _constant(-_LN2_LOW), rest)
    power = _constant(_TERMS[0])
    for term in _TERMS[1:]:
        power = _fma(builder, power, rest, _constant(term))
    exponent = builder.shl(
        builder.bitcast(shifted, _INT_LANES), ir.Constant(_INT_LANES, [23] * WIDTH)
    )
    scaled = builder.bitcast(builder.add(builder.bitcast(power, _INT_LANES), exponent), _LANES)
    is_small = builder.fcmp_ordered("<", x, _constant(_LEAST))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, x, builder.select(is_small, _constant(0.0), scaled))


fma = _operation(_fma, arguments=3)  # a * b + c, rounded once
add = _operation(lambda builder, a, b: builder.fadd(a, b), arguments=2)
subtract = _operation(lambda builder, a, b: builder.fsub(a, b), arguments=2)
multiply = _operation(lambda builder, a, b: builder.fmul(a, b), arguments=2)
spread = _operation(_spread, arguments=1)  # a float32 in every lane
exp = _operation(_exp, arguments=1)  # for numbers up to 87; NaN stays NaN
largest = _operation(_largest, arguments=1, returns=types.float32)  # NaN is passed over
total = _operation(_total, arguments=1, returns=types.float32)


@intrinsic  # type: ignore[untyped-decorator]
def load(typingctx: Any, array: Any, at: Any) -> Any:  # noqa: ARG001
    """Sixteen numbers of `array` from `at` on."""
    is_bfloat16 = array.dtype == types.uint16

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, array, values)
        if not is_bfloat16:
            return builder.load(builder.bitcast(pointer, _LANES.as_pointer()), align=4)
        halves = ir.VectorType(ir.IntType(16), WIDTH)
        loaded = builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2)
        wide = builder.zext(loaded, _INT_LANES)
        return builder.bitcast(builder.shl(wide, ir.Constant(_INT_LANES, [16] * WIDTH)), _LANES)

    return LANES(array, at), code


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, array: Any, at: Any, lanes: Any) -> Any:  # noqa: ARG001
    """Put sixteen numbers into a float32 `array` from `at` on."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, array, values[:2])
        builder.store(values[2], builder.bitcast(pointer, _LANES.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(array, at, lanes), code


def _address(context: Any, builder: Any, array: Any, values: Any) -> Any:
    struct = context.make_array(array)(context, builder, values[0])
    return builder.gep(struct.data, [values[1]])
