"""RMSNorm on a GPU as one kernel, which can add a residual first.

A decoder adds the output of a block to its residual and normalises the sum for the next block. The
next block's norm belongs to another layer, so the layer before computes sum and norm together, and
the norm keeps its result until it is called with that sum.

Shapes: D = dimensions of a row.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from model_runtime.gpu_layers.triton_norm import MOST_DIMS, Scale, add_and_normalize, normalize
from model_runtime.layers.match_norm import ROUNDING
from model_runtime.probing.equivalence import IsEqual, equal_by_scale


class GpuRmsNorm(nn.Module):
    """RMSNorm over the last dimension; `scale.plus_one` selects Gemma's formula."""

    def __init__(self, weight: nn.Parameter, scale: Scale) -> None:
        super().__init__()
        self.weight = weight  # model code may read its dtype
        self.scale = scale
        self._sum: Tensor | None = None
        self._norm: Tensor | None = None
        self.has_used_kept = False  # in the last call

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, same shape and dtype; the kept one, if x is the sum it belongs to."""
        kept, norm = self._sum, self._norm
        self.forget()
        self.has_used_kept = norm is not None and kept is x
        if norm is not None and kept is x:
            return norm
        return normalize(x, self.scale)

    def keep_sum(self, residual: Tensor, x: Tensor, inner: Scale | None) -> Tensor:
        """Return residual + x, and keep the sum's norm for the call that follows.

        `inner`: an RMSNorm of x before the addition.
        """
        self._sum, self._norm = add_and_normalize(residual, x, self.scale, inner)
        return self._sum

    def forget(self) -> None:
        self._sum = self._norm = None


def candidates(weight: nn.Parameter, eps: float) -> Iterator[tuple[nn.Module, IsEqual]]:
    """Yield both formulas over this weight, each with its comparison."""
    weight_D = weight.detach()
    if len(weight_D) > MOST_DIMS:
        return
    for plus_one in (False, True):
        factor_D = weight_D.float() + plus_one
        norm = GpuRmsNorm(weight, Scale(weight_D, eps, plus_one))
        yield norm, equal_by_scale(ROUNDING, factor_D)
