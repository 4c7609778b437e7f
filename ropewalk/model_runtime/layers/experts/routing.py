"""The routing of a mixture on a CPU, by rules that do not depend on other rows.

A router's product by torch has other bits for one row than for several, and bfloat16 logits tie
often: at rank 8 of 128 in six rows of a hundred. So the model's own code runs under three rules:

- a router's logits are float32, from weights and rows that are widened exactly;
- among equal scores the expert with the lower number is chosen, while torch's choice follows from
  its algorithm;
- sigmoid and softplus are computed in whole SIMD registers. torch's scalar code for the rest of a
  tensor has other bits.

Softmax, sums over a row and gathers do not depend on other rows.

The untouched model already runs under these rules, so that the self-check compares models that
choose the same experts. `lay_out.py` replaces torch's product by one whose rows do not depend on
each other.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ropewalk.model_runtime.layers.experts.low_bit import is_experts
from ropewalk.model_runtime.layers.experts.router_names import is_router
from ropewalk.model_runtime.layers.experts.top_k import TOP_K, first_top_k
from ropewalk.model_runtime.layers.packed_linear import rowwise

_CONVERSIONS = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as}
_ELEMENTWISE = {torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit, nn.functional.softplus}

Product = Callable[[Tensor], Tensor]


class RoutedLinear(nn.Linear):
    """A linear that chooses experts; no other code takes it for a plain linear."""


class Rules(TorchFunctionMode):
    """The rules of one block, for the functions of torch that its code calls."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        """Keep the weights of the block's routers."""
        super().__init__()
        self.weights = weights
        self.products: dict[int, Product] = {}  # by the id of a weight, once they are packed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what a rule says in its place."""
        del types
        named = kwargs or {}
        if func is nn.functional.linear and self._is_router(args[1]):
            return self._logits(*args, **named)
        if func in _CONVERSIONS and self._is_router(args[0]):
            return args[0]  # it is widened by the product
        if func in TOP_K:
            return first_top_k(*args, **named)
        if func in _ELEMENTWISE:
            return rowwise(lambda x: func(x, *args[1:], **named), args[0])
        return func(*args, **named)

    def _is_router(self, tensor: Any) -> bool:
        return any(tensor is each for each in self.weights)

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return float32 logits, [..., K] -> [..., E]."""
        product = self.products.get(id(weight))
        if product is None:
            out = nn.functional.linear(x.float(), weight.float())
        else:
            out = product(x.float().contiguous())
        return out if bias is None else out + bias.float()


class RuledForward:
    """The forward of a block under its rules."""

    def __init__(self, forward: Callable[..., Any], rules: Rules) -> None:
        self._forward, self.rules = forward, rules

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the block's own forward."""
        with self.rules:
            return self._forward(*arguments, **named)


def expert_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield each module that has experts as children, and the names of these children."""
    for module in model.modules():
        names = [name for name, child in module.named_children() if is_experts(child)]
        if names:
            yield module, names


def rule(model: nn.Module) -> None:
    """Let every block with experts run under the rules, in place; other models stay as they are."""
    for block, names in expert_blocks(model):
        experts: Any = getattr(block, names[0])
        weights = _router_weights(block, len(experts.down_proj), names)
        block.forward = RuledForward(block.forward, Rules(weights))


def rules_of(block: nn.Module) -> Rules | None:
    """Return the rules that a block's forward runs under, if it does."""
    forward = vars(block).get("forward")
    return forward.rules if isinstance(forward, RuledForward) else None


def _router_weights(block: nn.Module, num_experts: int, names: list[str]) -> list[nn.Parameter]:
    """Return the matrices with a row for each expert that are no plain linear's.

    A plain linear that has a router's name becomes a RoutedLinear.
    """
    found = []
    for name, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if (
            name.partition(".")[0] in names
            or not isinstance(weight, nn.Parameter)
            or weight.dim() != 2
            or len(weight) != num_experts
            or isinstance(module, nn.Embedding)
        ):
            continue
        if type(module) is nn.Linear:
            if not is_router(name):
                continue
            module.__class__ = RoutedLinear
        found.append(weight)
    return found
