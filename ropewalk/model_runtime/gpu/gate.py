"""One kernel for the activation of a gate and its product with the other half.

Both halves are read from one product. The activation is float32 and rounded before it is
multiplied, as transformers does.

Shapes: R = rows, I = dimensions of a half.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch
import triton.language as tl
from torch import Tensor, nn

from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.layers.replace_modules import activation_classes
from ropewalk.model_runtime.probing.equivalence import equal_by_row, first_equivalent, trial_rows

_BLOCK = 1024  # values of a half in one program
_WARPS = 4


class Activation(IntEnum):
    """The activations that the kernel knows."""

    SILU = 0
    GELU_TANH = 1


# What torch computes, for a trial, and for an activation without a gate.
FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: nn.functional.silu,
    Activation.GELU_TANH: partial(nn.functional.gelu, approximate="tanh"),
}
_TRIAL_SCALES = (0.1, 1.0, 30.0)  # reveal other activations, and those that clip large values
_ROUNDING = {torch.float32: 1e-5}  # relative to the norm of a row


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes, by a trial; None for another module."""
    if not isinstance(module, activation_classes()) or any(True for _ in module.parameters()):
        return None
    is_equal = equal_by_row(_ROUNDING)
    place = first_equivalent(
        module,
        lambda: [(function, is_equal) for function in FUNCTIONS.values()],
        trial_rows(64, _TRIAL_SCALES),
    )
    return None if place is None else list(FUNCTIONS)[place]


def activate_into(x: Tensor, out: Tensor, activation: Activation) -> None:
    """Write the activation of x, which no gate follows."""
    if activation == Activation.SILU:
        torch.ops.aten.silu.out(x, out=out)
    else:
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


@jit
def _gate(joined, out, HALF: tl.constexpr, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = i < HALF
    kind = out.dtype.element_ty
    at = joined + row * (2 * HALF) + i
    gate = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(at + HALF, mask=is_there, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:  # (1 + tanh(z)) / 2 is the logistic function of 2 z
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    fall = tl.exp(-tl.abs(slope))  # never overflows
    active = gate * tl.where(slope < 0, fall, 1.0) / (1.0 + fall)
    active = active.to(kind).to(tl.float32)
    tl.store(out + row * HALF + i, (active * up).to(kind), mask=is_there)


def gate_into(joined: Tensor, out: Tensor, activation: Activation) -> None:
    """Write activation(gate) * up, [R, I], of a product [R, 2 I] that has the gate first.

    Both tensors are contiguous.
    """
    half = out.shape[-1]
    num_rows = out.numel() // half
    if num_rows:
        _gate[(num_rows, -(-half // _BLOCK))](
            joined, out, HALF=half, IS_GELU=activation == Activation.GELU_TANH, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
