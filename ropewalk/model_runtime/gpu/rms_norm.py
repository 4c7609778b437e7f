"""RMSNorm on a GPU as one kernel, which can add a residual first.

A decoder adds the output of a block to its residual and normalises the sum for the next block. The
next block's norm belongs to another layer, so the layer before computes sum and norm together, and
the norm keeps its result until it is called with that sum.

Sums are float32. A result is rounded where transformers rounds it: the sum before its norm, and a
norm before its weight, except if the weight's factor is 1 + weight (Gemma).

Shapes: R = rows, C = columns, D = dimensions of a row or of a norm's columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor, nn

from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import padded
from ropewalk.model_runtime.layers.match_norm import ROUNDING, NormParts
from ropewalk.model_runtime.probing.equivalence import IsEqual, equal_by_scale

MOST_DIMS = 65_536  # of a row, which one program holds at once
_DIMS_PER_WARP = 512  # 16 values for each thread


@dataclass(frozen=True, slots=True)
class Scale:
    """The constants of an RMSNorm, x / sqrt(mean(x^2) + eps) * weight."""

    weight_D: Tensor
    eps: float
    plus_one: bool  # the factor is 1 + weight


@jit
def _scaled(values, weight, eps, target, d, WIDTH: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Return the norm of one row in float32, rounded to the target's number type."""
    kind = target.dtype.element_ty
    is_there = d < WIDTH
    factor = tl.load(weight + d, mask=is_there, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    if PLUS_ONE:
        return (values * (1.0 + factor)).to(kind).to(tl.float32)
    return (values.to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)


# No number that depends on the step's tokens is compiled in.
@jit("num_inner", "x_outer", "x_inner")
def _normalize(
    x, residual, weight, inner_weight, summed, out, eps, inner_eps, num_inner, x_outer, x_inner,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr,
    ADDS: tl.constexpr, HAS_INNER: tl.constexpr,
    PLUS_ONE: tl.constexpr, INNER_PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """One row. HAS_INNER: x has a norm of its own before it is added to the residual."""
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_2)
    is_there = d < WIDTH
    kind = out.dtype.element_ty
    place = r * WIDTH + d
    # Rows that are added lie behind each other. Told so, a thread loads neighbours at once.
    at = place if ADDS else r // num_inner * x_outer + r % num_inner * x_inner + d
    values = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = _scaled(values, inner_weight, inner_eps, out, d, WIDTH, INNER_PLUS_ONE)
    if ADDS:
        values += tl.load(residual + place, mask=is_there, other=0.0).to(tl.float32)
        values = values.to(kind).to(tl.float32)
        tl.store(summed + place, values.to(kind), mask=is_there)
    values = _scaled(values, weight, eps, out, d, WIDTH, PLUS_ONE)
    tl.store(out + place, values.to(kind), mask=is_there)


def normalize(x: Tensor, scale: Scale) -> Tensor:
    """Return the RMSNorm of x [..., D] over its last dimension, in x's dtype, contiguous.

    Only the numbers of a row must be contiguous, for instance of a head in a joined product.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        rows = x.view(-1, 1, width)
    else:
        rows = x.reshape(-1, x.shape[-2], width)  # a view, if x is heads of a joined product
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    form = (*rows.shape[:2], *rows.stride()[:2])
    _launch(form, rows, rows, scale, scale, out, out, adds=False, has_inner=False)
    return out


def normalize_into(
    x_RC: Tensor,
    scale: Scale,
    out_RC: Tensor,
    *,
    residual_RC: Tensor | None = None,
    summed_RC: Tensor | None = None,
    inner: Scale | None = None,
) -> None:
    """Write the RMSNorm of every so many columns of x as the scale has.

    With a residual, x is added to it, the sum goes to `summed_RC`, and the norm is that of the sum.
    `inner`: an RMSNorm of x before the addition.
    """
    num_rows, num_columns = x_RC.shape
    width = len(scale.weight_D)
    adds = residual_RC is not None
    residual, summed = (x_RC, out_RC) if residual_RC is None else (residual_RC, summed_RC)
    assert summed is not None, "a residual without a place for the sum"
    _launch(
        (num_rows, num_columns // width, x_RC.stride(0), width),
        x_RC, residual, scale, inner or scale, summed, out_RC,
        adds=adds, has_inner=inner is not None,
    )  # fmt: skip


def _launch(
    form: tuple[int, int, int, int],
    x: Tensor,
    residual: Tensor,
    scale: Scale,
    inner: Scale,
    summed: Tensor,
    out: Tensor,
    *,
    adds: bool,
    has_inner: bool,
) -> None:
    """Launch the kernel. `form`: outer and inner rows of x, and the strides of both."""
    num_outer, num_inner, *strides = form
    width = len(scale.weight_D)
    width_2 = padded(width)
    if num_outer * num_inner == 0:
        return
    _normalize[(num_outer * num_inner,)](
        x, residual, scale.weight_D, inner.weight_D, summed, out, scale.eps, inner.eps,
        num_inner, *strides, WIDTH=width, WIDTH_2=width_2,
        ADDS=adds, HAS_INNER=has_inner, PLUS_ONE=scale.plus_one, INNER_PLUS_ONE=inner.plus_one,
        num_warps=min(16, max(1, width_2 // _DIMS_PER_WARP)),
    )  # fmt: skip


class GpuRmsNorm(nn.Module):
    """RMSNorm over the last dimension; `scale.plus_one` selects Gemma's formula."""

    def __init__(self, weight: nn.Parameter, scale: Scale) -> None:
        super().__init__()
        self.weight = weight  # model code may read its dtype
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, same shape and dtype."""
        return normalize(x, self.scale)


def candidates(parts: NormParts) -> Iterator[tuple[nn.Module, IsEqual]]:
    """Yield both formulas over this weight, each with its comparison."""
    weight_D = parts.weight.detach()
    if len(weight_D) > MOST_DIMS or parts.bias is not None:
        return
    for plus_one in (False, True):
        factor_D = weight_D.float() + plus_one
        norm = GpuRmsNorm(parts.weight, Scale(weight_D, parts.eps, plus_one))
        yield norm, equal_by_scale(ROUNDING, factor_D)
