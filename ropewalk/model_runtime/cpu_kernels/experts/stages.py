"""The stages of a mixture within the one call of a decode step (`fused_decode.py`).

Threads share three stages, with a barrier after each:

1. the router's logits, a part of the panels each;
2. the first product and the gate: pairs of an expert and a panel, one expert after the other;
3. the second product and the sum of a row's experts: each thread has some panels of every expert.

Every thread chooses the experts from the logits for itself, because that takes less time than a
barrier. The sums are those of `products.py`, in its order.

Shapes: R = rows, E = experts, A = experts that some row chose, S = pairs of row and expert,
K = inputs, N = outputs, W = outputs with padding to whole panels, I = dimensions between the
products with padding, M = rows of an expert, F = fields of a matrix.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Ints, Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import narrow
from ropewalk.model_runtime.cpu_kernels.experts.gates import Gate, gate_panels
from ropewalk.model_runtime.cpu_kernels.experts.products import (
    ROWS_PER_READ,
    ExpertPanels,
    ExpertProduct,
    Integers,
    group_pairs,
    rows_of,
)
from ropewalk.model_runtime.cpu_kernels.experts.routing import route
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, broadcast, fma, load, pointer_to, store
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL

# Fields of one matrix of all experts, and of the routing before it.
(
    PACKED, PACKED_SIZE, PACKED_STEP, TABLE, TABLE_STEP, BIASES, BIAS_WIDTH, NUM_INPUTS, NUM_PANELS,
    NUM_EXPERTS, NUM_CHOICES, IS_NORMALISED, IS_ROUNDED, GATE, IS_MIXED,
) = range(15)  # fmt: skip


def matrix_fields(
    panels: ExpertPanels, num_choices: int, gate: Gate, *, is_normalised: bool, is_rounded: bool
) -> Ints:
    """Return the fields of a matrix; they have addresses of its memory."""
    num_experts, bias_width = panels.bias_EW.shape
    fields = {
        PACKED: panels.packed_Q.ctypes.data,
        PACKED_SIZE: panels.packed_Q.size,
        PACKED_STEP: panels.packed_step,
        TABLE: panels.layout,
        TABLE_STEP: panels.layout_step,
        BIASES: panels.bias_EW.ctypes.data,
        BIAS_WIDTH: bias_width,
        NUM_INPUTS: panels.num_inputs,
        NUM_PANELS: panels.num_panels,
        NUM_EXPERTS: num_experts,
        NUM_CHOICES: num_choices,
        IS_NORMALISED: int(is_normalised),
        IS_ROUNDED: int(is_rounded),
        GATE: gate.kind,
        IS_MIXED: int(gate.is_mixed),
    }
    return np.array([fields[each] for each in range(len(fields))], np.int64)


@jit()
def _pairs_of(
    fields_F: Ints, logits_RE: Floats
) -> tuple[Integers, Integers, Integers, Floats]:  # fmt: skip
    """Return active experts, their first pairs, and the row and weight of each pair."""
    num_rows, num_choices = logits_RE.shape[0], fields_F[NUM_CHOICES]
    choice_RC = np.empty((num_rows, num_choices), np.int64)
    weights_RC = np.empty((num_rows, num_choices), np.float32)
    route(logits_RE, fields_F[IS_NORMALISED], fields_F[IS_ROUNDED], choice_RC, weights_RC)
    experts_A, starts, row_of_S, slots_RC, sorted_RC = group_pairs(
        choice_RC, weights_RC, fields_F[NUM_EXPERTS]
    )
    weight_S = np.empty(row_of_S.shape[0], np.float32)
    for r in range(num_rows):
        for c in range(num_choices):
            weight_S[slots_RC[r, c]] = sorted_RC[r, c]
    return experts_A, starts, row_of_S, weight_S


@jit()
def unit_edge(starts: Integers, num_units: int, thread: int, num_threads: int) -> int:
    """Return a thread's first unit, so that all threads take about as long.

    Each expert has `num_units`, and a unit takes longer if more rows chose its expert.
    """
    num_active = starts.shape[0] - 1
    target = (num_active * ROWS_PER_READ + starts[num_active]) * num_units * thread // num_threads
    for place in range(num_active):
        cost = ROWS_PER_READ + starts[place + 1] - starts[place]
        if target < cost * num_units:
            return int(place * num_units + target // cost)
        target -= cost * num_units
    return int(num_active * num_units)


@cache
def stages(experts_product: ExpertProduct) -> tuple[Any, Any]:
    """Compiled: stages 2 and 3, with the experts' product of rows and panels."""
    multiply, rows_for = experts_product

    @jit()
    def product(
        fields_F: Ints, expert: int, rows: Any, like: Numbers, like_scale: Floats,
        out_MW: Floats, first: int, end: int,
    ) -> None:  # fmt: skip
        """Multiply converted rows by panels `first` to `end` - 1 of an expert."""
        packed_Q = carray(pointer_to(fields_F[PACKED], like), fields_F[PACKED_SIZE])
        biases_shape = (fields_F[NUM_EXPERTS], fields_F[BIAS_WIDTH])
        bias_EW = carray(pointer_to(fields_F[BIASES], like_scale), biases_shape)
        multiply(
            rows, packed_Q[fields_F[PACKED_STEP] * expert :], bias_EW[expert], out_MW,
            fields_F[TABLE] + fields_F[TABLE_STEP] * expert, fields_F[NUM_INPUTS], first, end,
        )  # fmt: skip

    @jit(apart=True)
    def enter(
        fields_F: Ints, factors_X: Floats, x_RK: Numbers, logits_RE: Floats, between_SI: Floats,
        like_scale: Floats, thread: int, num_threads: int,
    ) -> None:  # fmt: skip
        """Write a thread's part of what lies between the products."""
        experts_A, starts, row_of_S, _ = _pairs_of(fields_F, logits_RE)
        num_units, is_mixed = between_SI.shape[1] // PANEL, fields_F[IS_MIXED]
        first = unit_edge(starts, num_units, thread, num_threads)
        end = unit_edge(starts, num_units, thread + 1, num_threads)
        for place in range(first // num_units, (end + num_units - 1) // num_units):
            expert, top, bottom = experts_A[place], starts[place], starts[place + 1]
            begin = max(0, first - place * num_units)
            stop = min(num_units, end - place * num_units)
            rows = rows_for(rows_of(x_RK, row_of_S, top, bottom, fields_F[NUM_INPUTS]))
            both_MW = np.empty((bottom - top, 2 * num_units * PANEL), np.float32)
            arguments = (fields_F, expert, rows, x_RK, like_scale, both_MW)
            if is_mixed:
                product(*arguments, 2 * begin, min(2 * stop, fields_F[NUM_PANELS]))
            else:
                product(*arguments, begin, stop)
                product(*arguments, num_units + begin, num_units + stop)
            gate_panels(
                both_MW, between_SI, top, fields_F[GATE], is_mixed, factors_X[0], factors_X[1],
                begin, stop,
            )  # fmt: skip

    @jit(apart=True)
    def leave(
        fields_F: Ints, between_SI: Floats, logits_RE: Floats, out_RN: Numbers,
        like_scale: Floats, thread: int, num_threads: int,
    ) -> None:  # fmt: skip
        """Write a thread's part of the outputs, rounded once."""
        experts_A, starts, row_of_S, weight_S = _pairs_of(fields_F, logits_RE)
        num_panels = fields_F[NUM_PANELS]
        first = num_panels * thread // num_threads
        end = num_panels * (thread + 1) // num_threads
        width = num_panels * PANEL
        total_RW = np.zeros((out_RN.shape[0], width), np.float32)
        pair_S = np.arange(row_of_S.shape[0])
        for place in range(experts_A.shape[0]):
            top, bottom = starts[place], starts[place + 1]
            rows = rows_for(rows_of(between_SI, pair_S, top, bottom, fields_F[NUM_INPUTS]))
            y_MW = np.empty((bottom - top, width), np.float32)
            product(fields_F, experts_A[place], rows, out_RN, like_scale, y_MW, first, end)
            for m in range(bottom - top):
                weight, at = broadcast(weight_S[top + m]), row_of_S[top + m] * width
                for w in range(first * PANEL, end * PANEL, WIDTH):
                    y = load(y_MW, m * width + w)
                    store(total_RW, at + w, fma(weight, y, load(total_RW, at + w)))
        last = min(out_RN.shape[1], end * PANEL)
        for r in range(out_RN.shape[0]):
            narrow(total_RW[r, first * PANEL : last], out_RN[r, first * PANEL : last])

    return enter, leave
