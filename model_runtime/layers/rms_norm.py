"""RMSNorm in one pass over a row instead of seven over the tensor.

Every architecture has its own class for the same formula, so a norm is recognised by its outputs:
x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight). A module with other outputs is not replaced.

On a CPU every row is computed by the same code, whatever the other rows are. Its bits therefore do
not depend on the batch. On a GPU the first formula is torch's own kernel, one instead of eight. The
second formula is not replaced there. Sums are float32. A bf16 result is rounded once, although some
models round it twice.

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
from model_runtime.layers.equivalence import (
    IsEqual,
    equal_by_scale,
    first_equivalent,
    trial_rows,
)
from model_runtime.layers.replace_modules import swap_modules

_DTYPES = (torch.float32, torch.bfloat16)
_TRIAL_SCALES = (1e-3, 1.0, 30.0)  # the smallest reveals a wrong eps
_TRIAL_SHIFT = 0.5  # reveals a norm that subtracts the mean
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative


class RmsNorm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * scale over the last dimension."""

    def __init__(self, weight: nn.Parameter, scale_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight  # model code may read its dtype
        self.scale_D = scale_D.float().numpy()
        self.eps = np.float32(eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, same shape and dtype."""
        # numpy reshapes here, because torch takes twice as long for each of these calls.
        values = as_numpy(x.contiguous())
        out = np.empty_like(values)
        rows = (-1, len(self.scale_D))
        normalize(values.reshape(rows), self.scale_D, self.eps, out.reshape(rows))
        return as_tensor(out, x.dtype)


class TorchRmsNorm(nn.Module):
    """torch's RMSNorm, x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, same shape and dtype."""
        return nn.functional.rms_norm(x, (len(self.weight),), self.weight, self._eps)


@torch.inference_mode()
def replace_norms(model: nn.Module) -> None:
    """Replace every module that computes an RMSNorm by one of these, in place."""
    swap_modules(model, _as_norm)


def _candidates(weight: nn.Parameter, eps: float) -> Iterator[tuple[nn.Module, IsEqual]]:
    """Yield the possible norms on the weight's device, each with its comparison."""
    wide_D = weight.detach().float()
    if weight.device.type != "cpu" or kernel_fault() is not None:
        yield TorchRmsNorm(weight, eps), equal_by_scale(_ROUNDING, wide_D)
        return
    for scale_D in (wide_D, 1.0 + wide_D):
        yield RmsNorm(weight, scale_D, eps), equal_by_scale(_ROUNDING, scale_D)


def _as_norm(module: nn.Module) -> nn.Module | None:
    """Return the same norm, or None if the module is something else."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, nn.Parameter)
        or not isinstance(eps, float)
        or weight.dim() != 1
        or len(weight) < 2  # a single weight for whole rows would look like rows of one element
        or weight.dtype not in _DTYPES
        or len(list(module.parameters())) + len(list(module.buffers())) > 1
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    trial_RD = trial_rows(len(weight), _TRIAL_SCALES, _TRIAL_SHIFT)
    trial_RD = trial_RD.to(weight.device, weight.dtype)
    return first_equivalent(module, _candidates(weight, eps), trial_RD)
