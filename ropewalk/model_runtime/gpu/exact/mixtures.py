"""Mixtures of experts on a GPU whose rows have the same bits in any batch.

The model's own code of a block runs. Its linears are exact products (product.py), equal scores
choose the expert with the lower number, and the experts of all rows are multiplied by one kernel. A
row's experts are added in the order of its choices. Nothing waits for the device.

Shapes: R = rows, C = choices of a row, P = R x C pairs, E = experts, K = inputs, N = outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ropewalk.model_runtime.gpu.exact.product import (
    Weight,
    expert_products,
    product_of,
    row_tiles,
)
from ropewalk.model_runtime.layers.experts.low_bit import is_experts
from ropewalk.model_runtime.layers.experts.top_k import TOP_K, first_top_k
from ropewalk.model_runtime.layers.low_bits.stored import StoredExperts

_MATMUL = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
_MATRIX_DIMS = 2


class _Rules(TorchFunctionMode):
    """The functions of torch in a block's code that sum, or choose, by the number of rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what computes each row by itself."""
        del types
        named = kwargs or {}
        if func is nn.functional.linear:
            return product_of(*args, **named)
        if func in _MATMUL and args[1].dim() == _MATRIX_DIMS:
            return product_of(args[0], args[1].t())
        if func in TOP_K:
            return first_top_k(*args, **named)
        return func(*args, **named)


class ExactBlock:
    """The forward of a block with experts."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the block's own forward."""
        with _Rules():
            return self._forward(*arguments, **named)


class ExactExperts:
    """The forward of the experts of a layer."""

    def __init__(self, experts: Any) -> None:
        self._own = experts

    def __call__(self, x_RK: Tensor, index_RC: Tensor, weight_RC: Tensor) -> Tensor:
        """Return the weighted sum of each row's experts, [R, K]."""
        own = self._own
        num_rows, num_choices = index_RC.shape
        expert_P, order_P = torch.sort(index_RC.reshape(-1), stable=True)
        num_experts, chosen_P = len(own.down_proj), None
        if isinstance(own, StoredExperts) and len(expert_P) <= num_experts:
            # Only experts that are chosen are widened, each for one pair.
            chosen_P, num_experts = expert_P, len(expert_P)
            expert_P = torch.arange(num_experts, device=expert_P.device)
        tiles = row_tiles(expert_P, num_experts)
        first = "gate_up_proj" if own.has_gate else "up_proj"
        x_PK = x_RK[order_P // num_choices]
        both_PN = expert_products(x_PK, *self._matrix(first, chosen_P), tiles)
        inner = own._apply_gate(both_PN) if own.has_gate else own.act_fn(both_PN)  # noqa: SLF001
        out_PK = expert_products(inner.contiguous(), *self._matrix("down_proj", chosen_P), tiles)
        part_PK = out_PK.float() * weight_RC.reshape(-1)[order_P, None].float()
        placed_PK = torch.empty_like(part_PK).index_copy_(0, order_P, part_PK)
        of_choice = placed_PK.view(num_rows, num_choices, -1).unbind(1)
        total_RK = of_choice[0]
        for part_RK in of_choice[1:]:
            total_RK = total_RK + part_RK
        return total_RK.to(x_RK.dtype)

    def _matrix(self, name: str, chosen_P: Tensor | None) -> tuple[Sequence[Weight], Tensor | None]:
        """Return a matrix of all experts, [E, N, K], and its biases [E, N]; or of some experts."""
        own = self._own
        bias_EN = getattr(own, f"{name}_bias").detach() if own.has_bias else None
        if not isinstance(own, StoredExperts):
            weight = getattr(own, name).detach()
            return (weight.transpose(1, 2) if own.is_transposed else weight,), bias_EN
        matrices = own.matrices[name]
        if chosen_P is not None:
            matrices = tuple(each.experts(chosen_P) for each in matrices)
            bias_EN = None if bias_EN is None else bias_EN[chosen_P]
        return matrices, bias_EN

    def find_fault(self, like: Tensor) -> str | None:
        """Return what has other bits in a larger batch, by a trial; None: nothing has.

        Both forms of the products are compiled on the way. `like`: has the device and the number
        type of rows.
        """
        weights, _ = self._matrix("down_proj", None)
        num_experts, num_inputs = weights[0].shape[0], sum(each.shape[1] for each in weights)
        device, num_rows = like.device, 16 * num_experts + 1
        generator = torch.Generator(device).manual_seed(0)
        x_RK = torch.randn(num_rows, num_inputs, generator=generator, device=device).to(like.dtype)
        index_R1 = (torch.arange(num_rows, device=device) * 7 // 3 % num_experts)[:, None]
        weight_R1 = torch.ones_like(index_R1, dtype=x_RK.dtype)
        whole_RK = self(x_RK, index_R1, weight_R1)
        few = slice(num_rows - num_experts, num_rows)
        if torch.equal(self(x_RK[few], index_R1[few], weight_R1[few]), whole_RK[few]):
            return None
        return f"a product of {num_experts} experts"


def take_over(model: nn.Module) -> list[ExactExperts]:
    """Let every block with experts compute each row by itself, in place; return its experts.

    Experts that normalise their own outputs keep their code, and are no such block.
    """
    found = []
    for block in model.modules():
        experts: list[Any] = [
            each for each in block.children() if is_experts(each) and not each.has_post_expert_norm
        ]
        for each in experts:
            each.forward = ExactExperts(each)
            found.append(each.forward)
        if experts:
            block.forward = ExactBlock(block.forward)
    return found


def is_exact(module: nn.Module) -> bool:
    """Return whether a module that is called as a whole computes each row by itself."""
    return isinstance(vars(module).get("forward"), ExactBlock)
