"""Norms of any architecture, recognised by their outputs.

Every architecture has its own class for the same formula: x / sqrt(mean(x^2) + eps) * weight, or
* (1 + weight). A LayerNorm subtracts the mean before, and may add a bias. A module with other
outputs is not replaced.

Shapes: R = rows, D = dimensions of a row.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.layers.replace_modules import swap_modules
from ropewalk.model_runtime.probing.equivalence import (
    IsEqual,
    equal_by_scale,
    first_equivalent,
    trial_rows,
)


class NormParts(NamedTuple):
    """The numbers of a norm."""

    weight: nn.Parameter
    eps: float
    bias: nn.Parameter | None = None


# Makes the possible replacements of a norm from its parts, each with its comparison.
Candidates = Callable[[NormParts], Iterable[tuple[nn.Module, IsEqual]]]
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative

_TRIAL_SCALES = (1e-3, 1.0, 30.0)  # the smallest reveals a wrong eps
_TRIAL_SHIFT = 0.5  # reveals a norm that subtracts the mean


class TorchRmsNorm(nn.Module):
    """torch's RMSNorm, x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    It is one kernel on every device. A bf16 result is rounded once, although some models round it
    twice.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, same shape and dtype."""
        return nn.functional.rms_norm(x, (len(self.weight),), self.weight, self._eps)


def torch_candidates(parts: NormParts) -> Iterator[tuple[nn.Module, IsEqual]]:
    is_half = parts.weight.device.type == "cpu" and parts.weight.dtype == torch.float16
    if parts.bias is None and not is_half:  # a CPU serves no such model
        weight_D = parts.weight.detach().float()
        yield TorchRmsNorm(parts.weight, parts.eps), equal_by_scale(ROUNDING, weight_D)


@torch.inference_mode()
def replace_norms(model: nn.Module, candidates: Candidates = torch_candidates) -> None:
    """Replace every module that computes a norm by a candidate with its outputs, in place."""
    swap_modules(model, lambda module: equivalent_norm(module, candidates))


@torch.inference_mode()
def equivalent_norm(module: nn.Module, candidates: Candidates) -> Any:
    """Return the same norm, or None if the module is something else."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, nn.Parameter)
        or not isinstance(eps, float)
        or weight.dim() != 1
        or len(weight) < 2  # a single weight for whole rows would look like rows of one element
        or weight.dtype not in ROUNDING
        or not (bias is None or (isinstance(bias, nn.Parameter) and bias.shape == weight.shape))
        or len(list(module.parameters())) + len(list(module.buffers())) > 1 + (bias is not None)
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    trial_RD = trial_rows(len(weight), _TRIAL_SCALES, _TRIAL_SHIFT)
    trial_RD = trial_RD.to(weight.device, weight.dtype)
    parts = NormParts(weight, eps, bias)
    place = first_equivalent(module, lambda: candidates(parts), trial_RD)
    return None if place is None else list(candidates(parts))[place][0]
