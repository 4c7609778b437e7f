"""Gated feed-forward blocks on a CPU: down(act(gate(x)) * up(x)), one pass between its products.

A model's own module copies gate's half, computes an activation and multiplies, which here is one
pass over memory. In a decode step each of these calls costs as much as the arithmetic. Every
architecture has its own class for the block, so a block is recognised by its parts and its outputs.
A module with other outputs is not replaced.

Every value is computed by the same code, whatever the other rows are. Its bits therefore do not
depend on the batch. Everything between the products is float32. A bf16 result is rounded once,
although models round it twice.

Shapes: R = rows, I = dimensions between the products, G = both halves of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor, gated
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.layers.merged_linear import MergedPart
from ropewalk.model_runtime.layers.packed_linear import PackedLinear, RowwiseActivation
from ropewalk.model_runtime.layers.packed_product import PackedProduct
from ropewalk.model_runtime.layers.replace_modules import swap_modules
from ropewalk.model_runtime.probing.equivalence import equal_by_row, first_equivalent, trial_rows

_TRIAL_SCALES = (0.1, 1.0, 30.0)  # reveal other activations, and those that clip large values
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}  # relative to the norm of the output


class GatedMlp(nn.Module):
    """A gated block, down(act(gate(x)) * up(x)); gate and up are one product.

    `kind` is the activation (activations.py).
    """

    def __init__(self, gate_up: PackedProduct, down: PackedProduct, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block, [..., in] -> [..., out]; rows do not depend on each other."""
        x_RK = as_numpy(x.contiguous()).reshape(-1, self.gate_up.in_features)
        out_RN = self.multiply(x_RK)
        return as_tensor(out_RN, x.dtype).view(*x.shape[:-1], self.down.out_features)

    def multiply(self, x_RK: Any) -> Any:
        """Compute the block, [R, in] -> [R, out]; numpy arrays of float32 or of bf16's bits."""
        return self.down.multiply(gated(self.gate_up.multiply(x_RK), self.kind))


@torch.inference_mode()
def fuse(model: nn.Module) -> None:
    """Replace every packed module that computes the same block by a GatedMlp, in place."""
    swap_modules(model, _as_gated)


def _as_gated(module: nn.Module) -> GatedMlp | None:
    """Return the same block as a GatedMlp, or None if the module is something else."""
    children = list(module.children())
    linears = [child for child in children if isinstance(child, MergedPart | PackedLinear)]
    activations = [child for child in children if isinstance(child, RowwiseActivation)]
    if (
        len(children) != len(linears) + len(activations)
        or len(activations) != 1
        or activations[0].kind is None
        or any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
    ):
        return None
    parts = _parts(linears)
    if parts is None:
        return None
    gate_up, down, first = parts
    kind = activations[0].kind

    def block(x: Tensor) -> Tensor:
        """Compute the block by its linears, which have random numbers in the trial."""
        both = torch.cat([each(x) for each in first], dim=-1)
        between_RI = gated(as_numpy(both.flatten(0, -2)), kind)
        return down(as_tensor(between_RI, x.dtype).view(*x.shape[:-1], -1))  # type: ignore[no-any-return]

    trial = trial_rows(gate_up.in_features, _TRIAL_SCALES)[None].to(first[0].weight.dtype)
    if first_equivalent(module, lambda: [(block, equal_by_row(_ROUNDING))], trial) is None:
        return None
    return GatedMlp(gate_up, down.product, kind)


_Linear = MergedPart | PackedLinear


def _parts(linears: list[_Linear]) -> tuple[PackedProduct, PackedLinear, list[_Linear]] | None:
    """Return the first product, the second linear, and the linears of the first; None: no block.

    Gate and up are two linears that share a product, or one linear.
    """
    first: list[_Linear] = [each for each in linears if isinstance(each, MergedPart)]
    singles = [each for each in linears if isinstance(each, PackedLinear)]
    if not first and len(singles) == 2:
        first = [each for each in singles if each.out_features == 2 * _next(singles, each)]
        singles = [each for each in singles if each not in first]
    if len(singles) != 1 or len(first) not in (1, 2):
        return None
    (down,) = singles
    gate_up = first[0].product
    if (
        any(each.product is not gate_up for each in first)
        or not isinstance(gate_up, PackedProduct)
        or gate_up.out_features != 2 * down.in_features
        or down.in_features % WIDTH
    ):
        return None
    first.sort(key=lambda each: each.index if isinstance(each, MergedPart) else 0)
    return gate_up, down, first


def _next(pair: list[PackedLinear], first: PackedLinear) -> int:
    """Return the number of inputs of the other linear of two."""
    return pair[pair[0] is first].in_features
