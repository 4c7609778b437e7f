"""Root-mean-square norms in one pass over a row instead of seven over the tensor.

Every architecture has a class of its own for the same formula, so a norm is recognised by what it
answers: x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight). What answers anything else is left.

On a CPU a row is computed by the same code whatever stands beside it, so its bits do not depend on
the batch. On a GPU the first of the two is torch's own kernel, one instead of eight; the second is
left. Sums are taken in float32; a bf16 result is rounded once, where some models round twice.

Shapes: R = rows, D = dimensions of a row or of one head, C = columns that hold head beside head.
"""

import inspect
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from model_runtime.cpu_kernels.bfloat16 import as_numpy, as_tensor
from model_runtime.cpu_kernels.elementwise import normalize
from model_runtime.cpu_kernels.trials import kernel_fault
from model_runtime.layers.replace_modules import swap_modules

_DTYPES = (torch.float32, torch.bfloat16)
_TRIAL_SCALES = (1e-3, 1.0, 30.0)  # the smallest shows a wrong eps
_TRIAL_SHIFT = 0.5  # a norm that takes the mean away shows
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension."""

    def __init__(self, weight: nn.Parameter, scale_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight  # model code may ask for its dtype
        self.scale_D = scale_D.float().numpy()
        self.eps = np.float32(eps)

    def forward(self, x: Tensor) -> Tensor:
        """The norm, same shape and dtype."""
        # Shapes are numpy's business here: torch takes twice as long for each of these calls.
        numbers = as_numpy(x.contiguous())
        out = np.empty_like(numbers)
        rows = (-1, len(self.scale_D))
        normalize(numbers.reshape(rows), self.scale_D, self.eps, out.reshape(rows))
        return as_tensor(out, x.dtype)


class TorchRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, by torch."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The norm, same shape and dtype."""
        return nn.functional.rms_norm(x, (len(self.weight),), self.weight, self._eps)


@torch.inference_mode()
def replace_norms(model: nn.Module) -> None:
    """Put one of these in the place of every module that answers as one, in place."""
    swap_modules(model, _as_norm)


def _candidates(weight: nn.Parameter, eps: float) -> Iterator[tuple[nn.Module, Tensor]]:
    """What the norm may be on the weight's device, and what it multiplies a row by."""
    wide_D = weight.detach().float()
    if weight.device.type != "cpu" or kernel_fault() is not None:
        yield TorchRmsNorm(weight, eps), wide_D
        return
    for scale_D in (wide_D, 1.0 + wide_D):
        yield RmsNorm(weight, scale_D, eps), scale_D


def _as_norm(module: nn.Module) -> nn.Module | None:
    """The same norm, or None where the module is something else."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, nn.Parameter)
        or not isinstance(eps, float)
        or weight.dim() != 1
        or len(weight) < 2  # one number for a whole row would be taken for rows of one
        or weight.dtype not in _DTYPES
        or len(list(module.parameters())) + len(list(module.buffers())) > 1
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    generator = torch.Generator().manual_seed(0)
    noise_RD = torch.randn(len(_TRIAL_SCALES), len(weight), generator=generator) + _TRIAL_SHIFT
    x_RD = (noise_RD * torch.tensor(_TRIAL_SCALES)[:, None]).to(weight.device, weight.dtype)
    try:
        expected_RD = module(x_RD)
    except Exception:  # noqa: BLE001  # code of a checkpoint; what cannot take rows is no row norm
        return None
    if expected_RD.shape != x_RD.shape or expected_RD.dtype != x_RD.dtype:
        return None
    for norm, scale_D in _candidates(weight, eps):
        if _are_alike(norm(x_RD), expected_RD, scale_D):
            return norm
    return None


def _are_alike(answer_RD: Tensor, expected_RD: Tensor, scale_D: Tensor) -> bool:
    """Whether they differ by rounding only. Small scales make small answers: without the scales."""
    seen_D = scale_D != 0
    rounding = _ROUNDING[expected_RD.dtype]
    answer_RD, expected_RD = (
        each_RD.float()[:, seen_D] / scale_D[seen_D] for each_RD in (answer_RD, expected_RD)
    )
    is_alike = torch.allclose(answer_RD, expected_RD, rtol=rounding, atol=rounding)
    return is_alike and bool(seen_D.any())
