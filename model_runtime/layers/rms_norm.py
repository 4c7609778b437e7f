"""RMSNorm on a CPU, in one pass over a row instead of seven over the tensor.

Every row is computed by the same code, whatever the other rows are. Its bits therefore do not
depend on the batch. Sums are float32. A bf16 result is rounded once, although some models round it
twice. `match_norm.py` decides which modules are replaced.

Shapes: R = rows, D = dimensions of a row or of one head, C = columns that hold head beside head.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor, normalize
from ropewalk.model_runtime.layers.match_norm import ROUNDING
from ropewalk.model_runtime.probing.equivalence import IsEqual, equal_by_scale


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


def cpu_candidates(weight: nn.Parameter, eps: float) -> Iterator[tuple[nn.Module, IsEqual]]:
    """Yield both formulas over this weight, each with its comparison."""
    wide_D = weight.detach().float()
    for scale_D in (wide_D, 1.0 + wide_D):
        yield RmsNorm(weight, scale_D, eps), equal_by_scale(ROUNDING, scale_D)
