"""A trial at load shows whether products keep their bits if their outputs are divided.

A library chooses its kernel by the size of a weight, so a part of a weight may be multiplied in
another order of additions. Only its shape and number type count, not its numbers. So each shape is
tried once in a process, with random numbers.

Shapes: K = inputs, N = outputs, R = rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from ropewalk.model_runtime.layers.merged_linear import MergedPart, PlainProduct, Product
from ropewalk.model_runtime.runner.backends import has_cpu_kernels

_ROWS = (1, 3, 16, 40, 600)  # of the tried products; all kernels of packed_product.py are used
# A larger weight is tried with fewer outputs, because a trial must not need the model's memory.
_MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """One product: of a linear, or of several that read one tensor."""

    num_inputs: int
    shares: tuple[int, ...]  # outputs of each linear on a rank
    num_outputs: tuple[int, ...]  # of each linear on all ranks
    has_bias: tuple[bool, ...]

    def bounded(self, size: int, itemsize: int) -> "Shape":
        """Return the shape with at most _MOST_BYTES of whole weights."""
        num_bytes = sum(self.num_outputs) * self.num_inputs * itemsize
        if num_bytes <= _MOST_BYTES:
            return self
        shares = tuple(
            max(64, int(share * _MOST_BYTES / num_bytes) // 64 * 64) for share in self.shares
        )
        wholes = tuple(share * size for share in shares)
        return Shape(self.num_inputs, shares, wholes, self.has_bias)


def shapes_of(model: nn.Module, num_outputs: dict[str, int]) -> set[Shape]:
    """Return the shapes of the products of divided linears; `num_outputs`: of all ranks, by name.

    The linears must have been joined, and those that gather must still be known by their names.
    """
    groups: dict[int, list[tuple[str, Any]]] = {}
    for name in num_outputs:
        module: Any = model.get_submodule(name)
        module = getattr(module, "linear", module)  # inside of its gathers
        is_merged = isinstance(module, MergedPart)
        groups.setdefault(id(module.product if is_merged else module), []).append((name, module))
    return {
        Shape(
            members[0][1].in_features,
            tuple(module.out_features for _, module in members),
            tuple(num_outputs[name] for name, _ in members),
            tuple(module.bias is not None for _, module in members),
        )
        for members in groups.values()
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

    wholes, cuts, columns = [], [], []
    begin = 0
    for num, share, has_bias in zip(shape.num_outputs, shape.shares, shape.has_bias, strict=True):
        weight_NK = random(num, shape.num_inputs)
        bias_N = random(num) if has_bias else None
        first = where.rank * share
        end = max(first, min(first + share, num))
        wholes.append(_linear(weight_NK, bias_N, num))
        cuts.append(
            _linear(weight_NK[first:end], None if bias_N is None else bias_N[first:end], share)
        )
        columns.append((range(begin + first, begin + end), end - first))
        begin += num
    whole, cut = _products(where, wholes, cuts)
    for num_rows in _ROWS:
        x_RK = random(num_rows, shape.num_inputs)
        whole_RN, cut_RN = whole(x_RK), cut(x_RK)
        at = 0
        for share, (own, num_own) in zip(shape.shares, columns, strict=True):
            expected_RN = whole_RN[:, own.start : own.stop]
            if not torch.equal(cut_RN[:, at : at + num_own], expected_RN):
                return False
            at += share
    return True


def _products(where: Where, *groups: Sequence[nn.Linear]) -> list[Product]:
    """Return the product of each group of linears, built as a model's are."""
    if not has_cpu_kernels(where.device):
        return [PlainProduct(linears) for linears in groups]
    from ropewalk.model_runtime.layers.packed_linear import (  # noqa: PLC0415  # imports numba
        workshop_for,
    )
    from ropewalk.model_runtime.layers.packed_product import DTYPES, PackedProduct  # noqa: PLC0415

    if where.dtype not in DTYPES:
        return [PlainProduct(linears) for linears in groups]
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
