"""A trial at load shows whether products keep their bits if their outputs are divided.

A library chooses its kernel by the size of a weight, so a part of a weight may be multiplied in
another order of additions. Only its shape and number type count, not its numbers. So each shape is
tried once in a process, with random numbers.

Shapes: K = inputs, N = outputs, R = rows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from ropewalk.model_runtime.runner.backends import has_cpu_kernels

_ROWS = (1, 3, 16, 40, 600)  # of the tried products; all kernels of packed_product.py are used
# A larger weight is tried with fewer outputs, because a trial must not need the model's memory.
_MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """The product of one linear, which one process may join with others."""

    num_inputs: int
    share: int  # outputs on a rank
    num_outputs: int  # on all ranks
    num_beside: int  # outputs of other linears of the same module with as many inputs
    has_bias: bool

    def bounded(self, size: int, itemsize: int) -> "Shape":
        """Return the shape with at most _MOST_BYTES of whole weights."""
        num_bytes = (self.num_outputs + self.num_beside) * self.num_inputs * itemsize
        if num_bytes <= _MOST_BYTES:
            return self
        share, beside = (
            int(num * _MOST_BYTES / num_bytes) // 64 * 64 for num in (self.share, self.num_beside)
        )
        share = max(64, share)
        return Shape(self.num_inputs, share, share * size, beside, self.has_bias)


def shapes_of(model: nn.Module, num_outputs: dict[str, int]) -> set[Shape]:
    """Return the shapes of the products of divided linears; `num_outputs`: of all ranks, by name.

    Linears that gather must still be known by their names.
    """
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in num_outputs}
    # Inside of its gathers.
    linears = {name: getattr(each, "linear", each) for name, each in linears.items()}
    together = Counter[tuple[str, int]]()  # outputs by module and number of inputs
    for name, each in linears.items():
        together[name.rpartition(".")[0], each.in_features] += num_outputs[name]
    return {
        Shape(
            each.in_features,
            each.out_features,
            num_outputs[name],
            together[name.rpartition(".")[0], each.in_features] - num_outputs[name],
            each.bias is not None,
        )
        for name, each in linears.items()
    }


@dataclass(frozen=True, slots=True)
class Where:
    """The other things that the bits of a product may depend on."""

    rank: int
    size: int  # ranks
    dtype: torch.dtype
    device: torch.device
    num_threads: int


@cache
@torch.inference_mode()
def keeps_bits(shape: Shape, where: Where) -> bool:
    """Return whether this rank's part of a product has the bits of the whole one.

    The random weights are the same on every rank, and are multiplied as the model's are. A GPU's
    library chooses another order of additions for another number of rows, and few are tried, so a
    trial there shows nothing.
    """
    if where.device.type != "cpu":
        return False
    shape = shape.bounded(where.size, where.dtype.itemsize)
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(where.device, where.dtype)

    num, share = shape.num_outputs, shape.share
    weight_NK = random(num, shape.num_inputs)
    bias_N = random(num) if shape.has_bias else None
    first = where.rank * share
    end = max(first, min(first + share, num))
    own_bias_N = None if bias_N is None else bias_N[first:end]
    whole = _linear(weight_NK, bias_N, num)
    groups = [[_linear(weight_NK[first:end], own_bias_N, share)], [whole]]
    if shape.num_beside:
        beside_NK = random(shape.num_beside, shape.num_inputs)
        groups.append([whole, _linear(beside_NK, None, shape.num_beside)])
    cut, *wholes = _products(where, groups)
    for num_rows in _ROWS:
        x_RK = random(num_rows, shape.num_inputs)
        expected_RN = cut(x_RK)[:, : end - first]
        if not all(torch.equal(each(x_RK)[:, first:end], expected_RN) for each in wholes):
            return False
    return True


def _products(
    where: Where, groups: Sequence[Sequence[nn.Linear]]
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return the product of each group of linears, built as a model's are."""
    if not has_cpu_kernels(where.device):
        return [each for each, *_ in groups]  # nothing joins them
    from ropewalk.model_runtime.layers.packed_linear import (  # noqa: PLC0415  # imports numba
        workshop_for,
    )
    from ropewalk.model_runtime.layers.packed_product import DTYPES, PackedProduct  # noqa: PLC0415

    if where.dtype not in DTYPES:
        return [each for each, *_ in groups]
    workshop = workshop_for(where.dtype)
    return [PackedProduct(linears, workshop) for linears in groups]


def _linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, num: int) -> nn.Linear:
    """Return a linear with these first outputs; the rest of `num` are zeros."""
    num_inputs = weight_NK.shape[1]
    linear = nn.Linear(num_inputs, num, bias=bias_N is not None, device="meta")
    for name, rows in (("weight", weight_NK), ("bias", bias_N)):
        if rows is not None:
            padded = rows.new_zeros(num, *rows.shape[1:])
            padded[: len(rows)] = rows
            setattr(linear, name, nn.Parameter(padded, requires_grad=False))
    return linear
