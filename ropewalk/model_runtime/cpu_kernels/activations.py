"""Compiled activation functions over rows of float32, for gates and blocks without a gate.

Each value is computed by the same instructions, wherever it stands. Its bits therefore do not
depend on the row or on other rows.

Shapes: I = dimensions of a row, a multiple of WIDTH.
"""

from typing import Any

import numpy as np

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    divide,
    exp,
    fma,
    load,
    maximum,
    multiply,
    store,
    subtract,
    where_negative,
)

# The activations, by the numbers that the kernels know them by.
KINDS = SILU, GELU_TANH, GELU_ERF, SQUARED_RELU, SIGMOID = tuple(range(5))

_ZERO, _ONE, _HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
_LEAST = np.float32(-87.0)  # e^87 is a normal number, and 1 / e^87 is 0 beside any other
# 2 * sqrt(2 / pi), and the factor of the cube, of the approximation by tanh.
_TANH_1, _TANH_3 = np.float32(1.5957691216057308), np.float32(0.044715)
_FAR = np.float32(-14.0)  # gelu of smaller values is 0 in float32
_ROOT_HALF = np.float32(0.7071067811865476)
_MOST = np.float32(-9.0)  # of -|x| / sqrt(2); erfc(9) is 4e-37
# ln(erfc(t)) / t for t from 0 to 9, in ascending powers of t. It was fitted to math.erfc by least
# squares, weighted by the root of erfc. The error of erfc is below 1.2e-7.
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9 = (
    np.float32(number)
    for number in (
        -1.1283797025680542, -0.6366095542907715, -0.10283130407333374, 0.019284753128886223,
        -3.0663152301713126e-06, -0.0015683533856645226, 0.0006156781455501914,
        -0.0001277949777431786, 1.4582723451894708e-05, -7.170521598709456e-07,
    )
)  # fmt: skip


@jit(inline=True)
def _logistic(x: Any, z: Any) -> Any:
    """Return x / (1 + e^-z), with z of at least -87."""
    z = maximum(broadcast(_LEAST), z)
    return divide(x, add(broadcast(_ONE), exp(subtract(broadcast(_ZERO), z))))


@jit(inline=True)
def silu(x: Any) -> Any:
    """Return x / (1 + e^-x). Values of x below -87 are taken for -87, which leaves about 1e-36."""
    x = maximum(broadcast(_LEAST), x)
    return _logistic(x, x)


@jit(inline=True)
def _gelu_tanh(x: Any) -> Any:
    """Return x * (1 + tanh(z)) / 2 = x / (1 + e^-2z), z = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    x = maximum(broadcast(_FAR), x)
    cubed = multiply(multiply(x, x), multiply(x, broadcast(_TANH_3)))
    return _logistic(x, multiply(broadcast(_TANH_1), add(x, cubed)))


@jit(inline=True)
def _gelu_erf(x: Any) -> Any:
    """Return x * (1 + erf(x / sqrt(2))) / 2, by erfc of |x| / sqrt(2)."""
    x = maximum(broadcast(_FAR), x)
    negative = subtract(broadcast(_ZERO), maximum(x, subtract(broadcast(_ZERO), x)))
    below = maximum(broadcast(_MOST), multiply(negative, broadcast(_ROOT_HALF)))
    t = subtract(broadcast(_ZERO), below)
    power = fma(broadcast(_C9), t, broadcast(_C8))
    power = fma(power, t, broadcast(_C7))
    power = fma(power, t, broadcast(_C6))
    power = fma(power, t, broadcast(_C5))
    power = fma(power, t, broadcast(_C4))
    power = fma(power, t, broadcast(_C3))
    power = fma(power, t, broadcast(_C2))
    power = fma(power, t, broadcast(_C1))
    power = fma(power, t, broadcast(_C0))
    half = multiply(broadcast(_HALF), exp(multiply(power, t)))
    return multiply(x, where_negative(x, half, subtract(broadcast(_ONE), half)))


@jit(inline=True)
def _squared_relu(x: Any) -> Any:
    positive = maximum(broadcast(_ZERO), x)
    return multiply(positive, positive)


@jit(inline=True)
def _sigmoid(x: Any) -> Any:
    return _logistic(broadcast(_ONE), x)


@jit()
def activate(row_I: Floats, kind: int) -> None:
    """Compute an activation of each value in place; NaN stays NaN."""
    if kind == SILU:
        for i in range(0, row_I.shape[0], WIDTH):
            store(row_I, i, silu(load(row_I, i)))
    elif kind == GELU_TANH:
        for i in range(0, row_I.shape[0], WIDTH):
            store(row_I, i, _gelu_tanh(load(row_I, i)))
    elif kind == GELU_ERF:
        for i in range(0, row_I.shape[0], WIDTH):
            store(row_I, i, _gelu_erf(load(row_I, i)))
    elif kind == SIGMOID:
        for i in range(0, row_I.shape[0], WIDTH):
            store(row_I, i, _sigmoid(load(row_I, i)))
    else:
        for i in range(0, row_I.shape[0], WIDTH):
            store(row_I, i, _squared_relu(load(row_I, i)))
