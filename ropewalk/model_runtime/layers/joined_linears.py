"""What the product of several linears needs: their kinds, and their weights in one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear


def placeholder(weight: Tensor) -> nn.Parameter:
    """Return a parameter without memory, for a freed weight; model code may read its dtype only."""
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


def merged_weight(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights and biases; a linear without a bias gets zeros if another has one."""
    return torch.cat([linear.weight.detach() for linear in linears]), merged_bias(linears)


def merged_bias(linears: Sequence[Any]) -> Tensor | None:
    """Concatenate biases; a linear without one gets zeros if another has one."""
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return torch.cat([bias.detach() for bias in biases])


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear, with a weight of any number of bits."""
    return type(module) is nn.Linear or isinstance(module, LowBitLinear)


def can_join(modules: Sequence[Any]) -> bool:
    """Return whether all are linears of one dtype, and no two use the same weight.

    Floats beside few bits get panels (packed_linear.py).
    """
    return all(map(is_linear, modules)) and are_alike(modules)


def are_alike(linears: Sequence[Any]) -> bool:
    """Return whether linears have one dtype, and no two use the same weight."""
    dtypes = {module.weight.dtype for module in linears}
    weights = {id(module.weight) for module in linears}
    return len(dtypes) == 1 and len(weights) == len(linears)


def joined_weight(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return weights and biases as one; the linears' own weights become views of it, in place."""
    if len(linears) == 1:
        (linear,) = linears
        return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    weight_NK, bias_N = merged_weight(linears)
    parts = weight_NK.split_with_sizes([each.out_features for each in linears])
    for linear, part_NK in zip(linears, parts, strict=True):
        linear.weight.data = part_NK
    return weight_NK, bias_N
