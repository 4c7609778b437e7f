"""The gates of experts, between their two products.

Gates and ups lie in two halves, or take turns. Each value is computed by the same instructions,
wherever it stands.

Shapes: M, S = rows, W = outputs of the first product with padding to whole panels, I = dimensions
between the products with padding, O = outputs of a panel.
"""

from typing import NamedTuple

import numpy as np

from ropewalk.model_runtime.cpu_kernels.activations import KINDS, activate
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.elementwise import row_shares
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    divide,
    exp,
    load,
    maximum,
    multiply,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL
from ropewalk.model_runtime.cpu_kernels.threads import run_shares

CLAMPED = len(KINDS)  # (up + 1) * gate * sigmoid(alpha * gate), after both are clamped


class Gate(NamedTuple):
    """A gate: an activation of one half times the other, or the clamped one."""

    kind: int  # of KINDS, or CLAMPED
    is_mixed: bool  # whether gates and ups take turns
    alpha: float = 0.0
    limit: float = 0.0


@jit()
def _clamp(gate_O: Floats, up_O: Floats, alpha: np.float32, limit: np.float32) -> None:
    """Compute the clamped gate in place; NaN stays NaN."""
    zero, one = broadcast(np.float32(0.0)), broadcast(np.float32(1.0))
    most = broadcast(limit)
    least = subtract(zero, most)
    for o in range(0, PANEL, WIDTH):
        # min(x, l) is -max(-l, -x).
        gate = subtract(zero, maximum(least, subtract(zero, load(gate_O, o))))
        up = maximum(least, subtract(zero, maximum(least, subtract(zero, load(up_O, o)))))
        scaled = maximum(broadcast(np.float32(-87.0)), multiply(broadcast(alpha), gate))
        logistic = divide(gate, add(one, exp(subtract(zero, scaled))))
        store(gate_O, o, multiply(add(up, one), logistic))


@jit()
def gate_panels(
    both_MW: Floats, between_SI: Floats, top: int, kind: int, is_mixed: int,
    alpha: np.float32, limit: np.float32, first: int, end: int,
) -> None:  # fmt: skip
    """Write panels `first` to `end` - 1 of all rows, from row `top` of the output on."""
    half = between_SI.shape[1]
    gate_O, up_O = np.empty(PANEL, np.float32), np.empty(PANEL, np.float32)
    for m in range(both_MW.shape[0]):
        for at in range(first * PANEL, end * PANEL, PANEL):
            if is_mixed:
                for o in range(PANEL):
                    gate_O[o] = both_MW[m, 2 * (at + o)]
                    up_O[o] = both_MW[m, 2 * (at + o) + 1]
            else:
                for o in range(PANEL):
                    gate_O[o] = both_MW[m, at + o]
                    up_O[o] = both_MW[m, half + at + o]
            if kind == CLAMPED:
                _clamp(gate_O, up_O, alpha, limit)
            else:
                activate(gate_O, kind)
                for o in range(0, PANEL, WIDTH):
                    store(gate_O, o, multiply(load(gate_O, o), load(up_O, o)))
            between_SI[top + m, at : at + PANEL] = gate_O


@jit()
def _gate_rows(
    both_SW: Floats, between_SI: Floats, kind: int, is_mixed: int,
    alpha: np.float32, limit: np.float32, first: int, end: int,
) -> None:  # fmt: skip
    num_panels = between_SI.shape[1] // PANEL
    gate_panels(
        both_SW[first:end], between_SI, first, kind, is_mixed, alpha, limit, 0, num_panels
    )  # fmt: skip


def gated_experts(both_SW: Floats, gate: Gate) -> Floats:
    """Return the inputs of the second product, [S, W] -> [S, I]."""
    num_rows, width = both_SW.shape
    if width % (2 * PANEL):  # gates and ups in turn, the last panel has both
        both_SW = np.pad(both_SW, ((0, 0), (0, PANEL)))
    between_SI = np.empty((num_rows, both_SW.shape[1] // 2), np.float32)
    alpha, limit = np.float32(gate.alpha), np.float32(gate.limit)
    arguments = both_SW, between_SI, gate.kind, int(gate.is_mixed), alpha, limit
    shares = row_shares(num_rows, between_SI.size)
    run_shares(_gate_rows, shares, *arguments)
    return between_SI
