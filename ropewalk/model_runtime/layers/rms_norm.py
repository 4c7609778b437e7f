"""RMSNorm and LayerNorm on a CPU, in one pass over a row instead of seven over the tensor.

Every row is computed by the same code, whatever the other rows are. Its bits therefore do not
depend on the batch. Sums are float32. A bf16 result is rounded once, although some models round it
twice. `match_norm.py` decides which modules are replaced.

Shapes: R = rows, D = dimensions of a row or of one head.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor, normalize
from ropewalk.model_runtime.layers.match_norm import ROUNDING, NormParts
from ropewalk.model_runtime.probing.equivalence import IsEqual, equal_by_scale


class RmsNorm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * scale over the last dimension."""

    is_centered: ClassVar = False

    def __init__(self, parts: NormParts, scale_D: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = parts.weight, parts.bias  # model code may read their dtype
        self.scale_D = scale_D.float().numpy().copy()  # not of the file that holds the weights
        shift_D = torch.zeros_like(scale_D) if parts.bias is None else parts.bias.detach()
        self.shift_D = shift_D.float().numpy().copy()
        self.eps = np.float32(parts.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, same shape and dtype."""
        # numpy reshapes here, because torch takes twice as long for each of these calls.
        values = as_numpy(x.contiguous())
        out = np.empty_like(values)
        rows = (-1, len(self.scale_D))
        shapes = values.reshape(rows), out.reshape(rows)
        normalize(shapes[0], self.scale_D, self.shift_D, self.eps, self.is_centered, shapes[1])
        return as_tensor(out, x.dtype)


class CenteredNorm(RmsNorm):
    """LayerNorm, (x - mean) / sqrt(variance + eps) * scale + shift over the last dimension."""

    is_centered: ClassVar = True


def cpu_candidates(parts: NormParts) -> Iterator[tuple[nn.Module, IsEqual]]:
    """Yield the formulas over these parts, each with its comparison."""
    if parts.weight.dtype == torch.float16:  # a CPU serves no such model
        return
    wide_D = parts.weight.detach().float()
    kinds = (RmsNorm, CenteredNorm) if parts.bias is None else (CenteredNorm,)
    for kind in kinds:
        for scale_D in (wide_D, 1.0 + wide_D):
            yield kind(parts, scale_D), equal_by_scale(ROUNDING, scale_D)
