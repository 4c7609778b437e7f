"""Layers with states within the one call of a decode step (`fused_decode.py`).

Threads share the heads or the channels of a layer, so no state is written by two of them. The
functions are those that are otherwise called one by one.

Shapes: R = rows, Y = columns of a slot, V = value heads beside each other, C = channels, H = value
heads, N = slots of states, L = inputs that a slot of states keeps, K = dimensions of a key,
D = dimensions of a value, W = taps, F = fields.
"""

import numpy as np
from numba import carray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    Floats,
    FusedStep,
    Ints,
    Numbers,
    StateArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import widen
from ropewalk.model_runtime.cpu_kernels.fused_decode import (
    ADDRESS,
    CODE,
    DIM,
    EPS,
    FIRST,
    FIRST_AT,
    FIRST_WIDTH,
    FOURTH,
    FOURTH_AT,
    FOURTH_WIDTH,
    LAYER,
    LENGTH,
    NUM_HEADS,
    NUM_KEY_HEADS,
    OUT,
    OUT_WIDTH,
    SECOND,
    SECOND_AT,
    SECOND_WIDTH,
    SHIFT,
    THIRD,
    THIRD_AT,
    THIRD_WIDTH,
    VALUE_DIM,
)
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, pointer_to
from ropewalk.model_runtime.cpu_kernels.states.convolution import short_convolution
from ropewalk.model_runtime.cpu_kernels.states.delta_rule import gated_delta

# Fields of a layer's weights, at its ADDRESS.
TAPS, NUM_TAPS, NUM_CHANNELS, BIASES, RATES, STEP_BIASES, NORM = range(7)
_DOUBLES = np.zeros(1)


def weight_fields(**addresses: int) -> Ints:
    """Return the fields of a layer's weights, by their names in lower case; others are 0."""
    names = ("taps", "num_taps", "num_channels", "biases", "rates", "step_biases", "norm")
    return np.array([addresses.get(name, 0) for name in names], np.int64)


@jit()
def _rows(address: int, num_rows: int, width: int, like: Numbers) -> Numbers:
    rows: Numbers = carray(pointer_to(address, like), (num_rows, width))
    return rows


@jit()
def _delta(
    fields_F: Ints, factors_X: Floats, addresses_B: Ints, num_rows: int, like: Numbers,
    step: FusedStep, thread: int, num_threads: int,
) -> None:  # fmt: skip
    """Advance a thread's heads of a Gated DeltaNet."""
    states = StateArrays(*step.states)
    num_heads, num_key_heads = fields_F[NUM_HEADS], fields_F[NUM_KEY_HEADS]
    key_dim, dim, layer = fields_F[DIM], fields_F[VALUE_DIM], fields_F[LAYER]
    weights_F = carray(pointer_to(fields_F[ADDRESS], fields_F), fields_F[LENGTH])
    num_taps, num_channels = weights_F[NUM_TAPS], weights_F[NUM_CHANNELS]
    x_RY = _rows(addresses_B[fields_F[FIRST]], num_rows, fields_F[FIRST_WIDTH], like)
    gate_RY = _rows(addresses_B[fields_F[SECOND]], num_rows, fields_F[SECOND_WIDTH], like)
    betas_RY = _rows(addresses_B[fields_F[THIRD]], num_rows, fields_F[THIRD_WIDTH], like)
    steps_RY = _rows(addresses_B[fields_F[FOURTH]], num_rows, fields_F[FOURTH_WIDTH], like)
    x_at, gate_at = fields_F[FIRST_AT], fields_F[SECOND_AT]
    beta_at, step_at = fields_F[THIRD_AT], fields_F[FOURTH_AT]
    beta_RH = np.empty((num_rows, num_heads), np.float32)
    step_RH = np.empty((num_rows, num_heads), np.float32)
    for r in range(num_rows):
        widen(betas_RY[r, beta_at : beta_at + num_heads], beta_RH[r])
        widen(steps_RY[r, step_at : step_at + num_heads], step_RH[r])
    floats = step.like_scale
    weights = (
        carray(pointer_to(weights_F[TAPS], floats), (num_taps, num_channels)),
        carray(pointer_to(weights_F[RATES], _DOUBLES), num_heads),
        carray(pointer_to(weights_F[STEP_BIASES], _DOUBLES), num_heads),
        carray(pointer_to(weights_F[NORM], floats), dim),
        factors_X[EPS],
    )
    tail_shape = (states.num_slots, num_taps - 1, num_channels)
    tail_NLC = carray(pointer_to(states.addresses_LX[layer, 0], floats), tail_shape)
    state_shape = (states.num_slots, num_heads, key_dim, dim)
    state_NHKD = carray(pointer_to(states.addresses_LX[layer, 1], floats), state_shape)
    out_RV = _rows(addresses_B[fields_F[OUT]], num_rows, fields_F[OUT_WIDTH], like)
    gated_delta(
        num_key_heads, states.parts_X4, (x_RY, x_at, gate_RY, gate_at, beta_RH, step_RH), weights,
        tail_NLC, state_NHKD, out_RV,
        num_key_heads * thread // num_threads, num_key_heads * (thread + 1) // num_threads,
    )  # fmt: skip


@jit()
def _convolution(
    fields_F: Ints, addresses_B: Ints, num_rows: int, like: Numbers,
    step: FusedStep, thread: int, num_threads: int,
) -> None:  # fmt: skip
    """Advance a thread's channels of a short convolution."""
    states, layer, x_at = StateArrays(*step.states), fields_F[LAYER], fields_F[FIRST_AT]
    weights_F = carray(pointer_to(fields_F[ADDRESS], fields_F), fields_F[LENGTH])
    num_taps, num_channels = weights_F[NUM_TAPS], weights_F[NUM_CHANNELS]
    joined_RY = _rows(addresses_B[fields_F[FIRST]], num_rows, fields_F[FIRST_WIDTH], like)
    floats = step.like_scale
    taps_WC = carray(pointer_to(weights_F[TAPS], floats), (num_taps, num_channels))
    bias_C = carray(pointer_to(weights_F[BIASES], floats), num_channels)
    tail_shape = (states.num_slots, num_taps - 1, num_channels)
    tail_NLC = carray(pointer_to(states.addresses_LX[layer, 0], floats), tail_shape)
    out_RC = _rows(addresses_B[fields_F[OUT]], num_rows, fields_F[OUT_WIDTH], like)
    num_registers = num_channels // WIDTH
    short_convolution(
        joined_RY, x_at, states.parts_X4, taps_WC, bias_C, tail_NLC, np.empty_like(out_RC), out_RC,
        num_registers * thread // num_threads * WIDTH,
        num_registers * (thread + 1) // num_threads * WIDTH,
    )  # fmt: skip


@jit()
def advance(
    fields_F: Ints, factors_X: Floats, addresses_B: Ints, num_rows: int, like: Numbers,
    step: FusedStep, thread: int, num_threads: int,
) -> None:  # fmt: skip
    """Advance a thread's part of a layer's states by the rows of a step."""
    if fields_F[CODE] == SHIFT:
        _convolution(fields_F, addresses_B, num_rows, like, step, thread, num_threads)
    else:
        _delta(fields_F, factors_X, addresses_B, num_rows, like, step, thread, num_threads)
