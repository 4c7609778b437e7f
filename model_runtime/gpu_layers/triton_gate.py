"""One kernel for the activation of a gate and its product with the other half.

Both halves are read from one joined product. The activation is float32 and rounded before it is
multiplied, as transformers does.

Shapes: R = rows, I = dimensions of a half.
"""

from enum import IntEnum

import torch
import triton.language as tl
from torch import Tensor

from model_runtime.attention.triton.pieces import jit

_BLOCK = 1024  # values of a half in one program
_WARPS = 4


class Activation(IntEnum):
    """The activations that the kernel knows."""

    SILU = 0
    GELU_TANH = 1


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


def gated(joined: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, [..., I], of a product [..., 2 I] that has the gate first."""
    joined = joined.contiguous()
    half = joined.shape[-1] // 2
    out = torch.empty(*joined.shape[:-1], half, dtype=joined.dtype, device=joined.device)
    num_rows = joined.numel() // (2 * half)
    if num_rows:
        _gate[(num_rows, -(-half // _BLOCK))](
            joined, out, HALF=half, IS_GELU=activation == Activation.GELU_TANH, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
    return out
