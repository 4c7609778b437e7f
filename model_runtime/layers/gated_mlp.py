"""Gated feed-forward blocks on a CPU: down(silu(gate(x)) * up(x)), between its products one pass.

A model computes it in a module of its own, with a copy of gate's half, an activation and a product
for what is one pass over memory, and in a decode step each of these calls costs as much as the
numbers do. Every architecture has a class of its own for it, so a block is recognised by its parts
and by what it answers. What answers anything else is left.

A number is computed by the same code whatever stands beside it, so its bits do not depend on the
batch. Everything between the products is float32; a bf16 result is rounded once, where models
round twice.

Shapes: R = rows, I = dimensions between the products, G = both halves of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model_runtime.cpu_kernels.bfloat16 import as_numpy, as_tensor
from model_runtime.cpu_kernels.elementwise import gated
from model_runtime.cpu_kernels.simd import (
    WIDTH,
)
from model_runtime.layers.merged_linear import MergedPart
from model_runtime.layers.packed_linear import PackedLinear, RowwiseActivation
from model_runtime.layers.packed_product import PackedProduct
from model_runtime.layers.replace_modules import swap_modules

_TRIAL_SCALES = (0.1, 1.0, 30.0)  # other activations, and those that cut large numbers off, show
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}  # of the answer's length


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, gate_up: PackedProduct, down: PackedProduct) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], each row as if it were alone."""
        x_RK = as_numpy(x.contiguous()).reshape(-1, self.gate_up.in_features)
        out_RN = self.multiply(x_RK)
        return as_tensor(out_RN, x.dtype).view(*x.shape[:-1], self.down.out_features)

    def multiply(self, x_RK: Any) -> Any:
        """[R, in] -> [R, out], numpy's arrays of float32 or of bf16's bits."""
        return self.down.multiply(gated(self.gate_up.multiply(x_RK)))


@torch.inference_mode()
def fuse(model: nn.Module) -> None:
    """Put a GatedMlp in the place of every packed module that answers as one, in place."""
    swap_modules(model, _as_gated)


def _as_gated(module: nn.Module) -> GatedMlp | None:
    """The same block, or None where the module is something else."""
    children = list(module.children())
    halves = [child for child in children if isinstance(child, MergedPart)]
    downs = [child for child in children if isinstance(child, PackedLinear)]
    activations = [child for child in children if isinstance(child, RowwiseActivation)]
    if (
        (len(children), len(halves), len(downs), len(activations)) != (4, 2, 1, 1)
        or halves[0].product is not halves[1].product
        or not isinstance(halves[0].product, PackedProduct)
        or halves[0].product.out_features != 2 * downs[0].in_features
        or downs[0].in_features % WIDTH
        or any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
    ):
        return None
    mlp = GatedMlp(halves[0].product, downs[0].product)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, len(_TRIAL_SCALES), halves[0].in_features, generator=generator)
    dtype = halves[0].weight.dtype
    x = (noise * torch.tensor(_TRIAL_SCALES)[:, None]).to(dtype)
    try:
        expected = module(x)
    except Exception:  # noqa: BLE001  # code of a checkpoint; what cannot take rows is no such block
        return None
    return mlp if _are_alike(mlp(x), expected) else None


def _are_alike(answer: Tensor, expected: Tensor) -> bool:
    """Whether each row differs by rounding only."""
    if answer.shape != expected.shape or answer.dtype != expected.dtype:
        return False
    apart = (answer.float() - expected.float()).norm(dim=-1)
    return bool((apart <= _ROUNDING[expected.dtype] * expected.float().norm(dim=-1)).all())
