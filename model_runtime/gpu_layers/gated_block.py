"""Gated feed-forward blocks on a GPU: down(activation(gate(x)) * up(x)), with one kernel between.

A model's own module computes the activation and the product as two kernels over strided halves of
one product. A block is recognised by its parts and its outputs. A module with other outputs is not
replaced.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model_runtime.gpu_layers.triton_gate import Activation, gated
from model_runtime.layers.merged_linear import MergedPart
from model_runtime.layers.replace_modules import activation_classes, swap_modules
from model_runtime.probing.equivalence import equal_by_row, first_equivalent, trial_rows

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
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block, [..., in] -> [..., out]."""
        out: Tensor = self.down_proj(gated(self.joined(x), self._activation))
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
