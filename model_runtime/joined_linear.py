"""Linears that read one tensor, multiplied at once: queries, keys and values; gate and up.

One product of a wide weight is one call where there were several, and on a GPU one kernel that
fills it better. The first linear that is called computes for all of them, the others take their
part.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]


class SharedInput:
    """The product of linears that read one tensor, until the last of them has read it."""

    def __init__(self, product: Product, widths: Sequence[int]) -> None:
        """`widths`: outputs of each linear, in the order of their calls."""
        self._product = product
        self._widths = list(widths)
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        """What one of the linears makes of x, computed for all of them when x is new."""
        if self._input is not x:
            self._input, self._parts = x, self._product(x).split_with_sizes(self._widths, dim=-1)
        out = self._parts[index]
        if index == len(self._widths) - 1:
            self._input, self._parts = None, ()
        return out


class JoinedPart(nn.Module):
    """One of several linears that read one tensor.

    Its answer is a slice, so its rows are not one after the other in memory.
    """

    def __init__(self, linear: nn.Linear, shared: SharedInput, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Model code may ask a weight for its dtype, never for its numbers.
        weight = torch.empty_like(linear.weight, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        self._shared = shared
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self._shared.part(x, self._index)


def joined_weight(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases one after the other; zeros where only others have a bias."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return weight, torch.cat([bias.detach() for bias in biases])


def can_join(modules: Sequence[nn.Module]) -> bool:
    """Whether all are plain linears of one dtype, and no two share a weight."""
    linears = [module for module in modules if type(module) is nn.Linear]
    dtypes = {linear.weight.dtype for linear in linears}
    pointers = {id(linear.weight) for linear in linears}
    return len(linears) == len(modules) == len(pointers) and len(dtypes) == 1


@torch.inference_mode()
def join(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Replace each group of linears by parts of one product, in place; the weights are let go.

    `groups`: names of linears that read one tensor, in the order of their calls
    (takeover.shared_inputs finds them).
    """
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        if not can_join(linears):
            continue
        weight, bias = joined_weight(linears)  # type: ignore[arg-type]
        shared = SharedInput(_linear(weight, bias), [each.out_features for each in linears])  # type: ignore[misc]
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            model.set_submodule(name, JoinedPart(linear, shared, index))  # type: ignore[arg-type]


def _linear(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: nn.functional.linear(x, weight, bias)
