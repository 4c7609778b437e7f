"""Gated feed-forward blocks on a GPU: down(activation(gate(x)) * up(x)), with one kernel between.

A model's own module computes the activation and the product as two kernels over strided halves of
one product. A block is recognised by its parts and its outputs. A module with other outputs is not
replaced.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import triton.language as tl
from torch import Tensor, nn

from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.layers.merged_linear import MergedPart, PlainProduct
from ropewalk.model_runtime.layers.replace_modules import activation_classes, swap_modules
from ropewalk.model_runtime.probing.equivalence import equal_by_row, first_equivalent, trial_rows

# One kernel for the activation of a gate and its product with the other half.
#
# Both halves are read from one joined product. The activation is float32 and rounded before it is
# multiplied, as transformers does.
#
# Shapes: R = rows, I = dimensions of a half.

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
    gate_into(joined, out, activation)
    return out


def gate_into(joined: Tensor, out: Tensor, activation: Activation) -> None:
    """Write what `gated` returns; both tensors are contiguous."""
    half = out.shape[-1]
    num_rows = out.numel() // half
    if num_rows:
        _gate[(num_rows, -(-half // _BLOCK))](
            joined, out, HALF=half, IS_GELU=activation == Activation.GELU_TANH, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip


_TRIAL_SCALES = (0.1, 1.0, 30.0)  # reveal other activations, and those that clip large values
# Relative to the norm of the output. bf16 sums of products differ between shapes by more.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}


class GatedBlock(nn.Module):
    """A gated block; `joined` gives the gate's outputs, then those that it multiplies."""

    def __init__(
        self, joined: Callable[[Tensor], Tensor], down: nn.Linear, activation: Activation
    ) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down
        self.activation = activation

    @property
    def joined_parts(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of the joined product."""
        joined: Any = self.joined
        return joined.parts if isinstance(joined, PlainProduct) else (joined.weight, joined.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block, [..., in] -> [..., out]."""
        out: Tensor = self.down_proj(gated(self.joined(x), self.activation))
        return out


@torch.inference_mode()
def fuse_gates(model: nn.Module) -> None:
    """Replace every module that computes such a block, in place."""
    swap_modules(model, _as_gated)


def _as_gated(module: nn.Module) -> GatedBlock | None:
    """Return the same block, or None if the module is something else."""
    children = list(module.children())
    halves = [child for child in children if isinstance(child, MergedPart)]
    linears = [child for child in children if type(child) is nn.Linear]
    activations = [child for child in children if isinstance(child, activation_classes())]
    if (
        len(halves) + len(linears) + len(activations) != len(children)
        or len(activations) != 1
        or any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
    ):
        return None
    found = _joined(halves, linears)
    if found is None:
        return None
    joined, down = found
    if down.weight.dtype not in _ROUNDING:
        return None
    trial = trial_rows(_in_features(halves, linears, down), _TRIAL_SCALES)[None]
    trial = trial.to(down.weight.device, down.weight.dtype)
    blocks = [GatedBlock(joined, down, each) for each in Activation]
    # Merged linears compute with random numbers in the trial, and their product does not.
    parts = sorted(halves, key=lambda half: half.index)
    tried = joined if not parts else lambda x: torch.cat([part(x) for part in parts], dim=-1)
    is_equal = equal_by_row(_ROUNDING)
    place = first_equivalent(
        module, lambda: [(GatedBlock(tried, down, each), is_equal) for each in Activation], trial
    )
    return None if place is None else blocks[place]


def _joined(
    halves: list[MergedPart], linears: list[nn.Linear]
) -> tuple[Callable[[Tensor], Tensor], nn.Linear] | None:
    """Return the product of both halves and the last linear; None for other parts."""
    if (len(halves), len(linears)) == (2, 1) and halves[0].product is halves[1].product:
        (down,) = linears
        widths = {half.out_features for half in halves}
        return (halves[0].product, down) if widths == {down.in_features} else None
    if (len(halves), len(linears)) == (0, 2):  # the checkpoint has one weight for both halves
        for first, down in (linears, linears[::-1]):
            if first.out_features == 2 * down.in_features:
                return first, down
    return None


def _in_features(halves: list[MergedPart], linears: list[nn.Linear], down: nn.Linear) -> int:
    others = [each for each in linears if each is not down]
    return (halves or others)[0].in_features
