"""Merged linears: linears that read one tensor, such as queries, keys and values, or gate and up.

One product of a wide weight replaces several calls. On a GPU it is one kernel that fills the device
better. The first linear that is called computes the outputs of all of them. The others return their
part.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear
from ropewalk.model_runtime.probing.probe import recorded_calls

Product = Callable[[Tensor], Tensor]


class SharedInput:
    """The product of linears that read one tensor, until the last of them has read it."""

    def __init__(self, product: Product, widths: Sequence[int]) -> None:
        """Keep the product. `widths`: outputs of each linear, in the order of their calls."""
        self.product = product
        self._widths = list(widths)
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return one linear's output for x; if x is new, compute the outputs of all linears."""
        if self._input is not x:
            self._input, self._parts = x, self.product(x).split_with_sizes(self._widths, dim=-1)
        out = self._parts[index]
        if index == len(self._widths) - 1:
            self.forget()
        return out

    def forget(self) -> None:
        """Free the product, if a failed forward has left it."""
        self._input, self._parts = None, ()


def placeholder(weight: Tensor) -> nn.Parameter:
    """Return a parameter without memory, for a freed weight; model code may read its dtype only."""
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


class MergedPart(nn.Module):
    """One of several linears that read one tensor.

    Its output is a slice, so its rows are not contiguous in memory.
    """

    is_linear: ClassVar = True  # see random_numbers.py

    def __init__(self, linear: nn.Linear | LowBitLinear, shared: SharedInput, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = placeholder(linear.weight)
        self.bias = linear.bias
        self.shared = shared
        self.index = index  # among the parts of the product

    @property
    def product(self) -> Product:
        return self.shared.product

    def forward(self, x: Tensor) -> Tensor:
        """Return this linear's output, [..., in] -> [..., out]."""
        return self.shared.part(x, self.index)

    def forget(self) -> None:
        """Free the product of all linears of the group, if a failed forward has left it."""
        self.shared.forget()


def forget_results(model: nn.Module) -> None:
    """Free what a failed forward has left in merged linears, and in the norms of a GPU."""
    for module in model.modules():
        # The class is asked, because a checkpoint's module may have a child with this name.
        forget: Any = getattr(type(module), "forget", None)
        if callable(forget):
            forget(module)


def merged_weight(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights and biases; a linear without a bias gets zeros if another has one."""
    return torch.cat([linear.weight.detach() for linear in linears]), merged_bias(linears)


def merged_bias(linears: Sequence[nn.Linear | LowBitLinear]) -> Tensor | None:
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


def can_join(modules: Sequence[nn.Module]) -> bool:
    """Return whether all are linears of one kind and dtype, and no two use the same weight."""
    if all(isinstance(module, LowBitLinear) for module in modules):
        return True
    linears = [module for module in modules if type(module) is nn.Linear]
    dtypes = {linear.weight.dtype for linear in linears}
    weights = {id(linear.weight) for linear in linears}
    return len(linears) == len(modules) == len(weights) and len(dtypes) == 1


class PlainProduct:
    """The product of the joined weights of linears, by torch."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.parts = merged_weight(linears)  # the weight and the bias

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.parts)


@torch.inference_mode()
def join(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    product: Callable[[Sequence[nn.Linear]], Product] = PlainProduct,
) -> None:
    """Replace each group of linears by parts of one product, in place; their weights are freed.

    `groups`: names of linears that read one tensor, in the order of their calls
    (`shared_inputs` finds them).
    """
    for names in groups:
        linears: list[Any] = [model.get_submodule(name) for name in names]
        if not can_join(linears):
            continue
        shared = SharedInput(product(linears), [each.out_features for each in linears])
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            model.set_submodule(name, MergedPart(linear, shared, index))


def shared_inputs(model: nn.Module) -> list[list[str]]:
    """Return the names of a patched model's linears that read one tensor, a list per tensor.

    Hooks on a forward find linears that are called once each, in sequence, with the same object.
    Raises ModelError if the model does not run.
    """
    calls: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Callable[..., None]:
        return lambda _, inputs: calls.append((name, inputs[0]))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if is_linear(module):
                hook = module.register_forward_pre_hook(watch(name))
                stack.callback(hook.remove)
        recorded_calls(model)
    num_calls = Counter(name for name, _ in calls)
    groups: list[list[str]] = []
    before: Tensor | None = None
    for name, tensor in calls:
        if num_calls[name] > 1:
            before = None
        elif tensor is before:
            groups[-1].append(name)
        else:
            before = tensor
            groups.append([name])
    return [names for names in groups if len(names) > 1]
