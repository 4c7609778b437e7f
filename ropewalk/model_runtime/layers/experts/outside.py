"""Experts outside transformers' interface on a CPU, with rows that do not depend on each other.

Such a module multiplies parts of its own parameters (DBRX, JetMoe). Its code runs, and each of
these products is one chain of sums over all inputs, as those of other experts are. A part is laid
out in panels for each call, so the weights are in memory once. That takes about as long as reading
them twice more.

Shapes: K = inputs, N = outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import FLOAT32, RowProducts, own_panels
from ropewalk.model_runtime.layers.experts.low_bit import is_experts
from ropewalk.model_runtime.layers.experts.routing import expert_blocks
from ropewalk.model_runtime.layers.packed_product import DTYPES

_COUNTS = ("num_experts", "moe_num_experts")  # attributes of a module that has such experts
_MATMUL = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class RowwiseExperts(TorchFunctionMode):
    """The forward of a module whose products with its own parameters know one row each."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Keep the parameters, and the forward that calls torch."""
        super().__init__()
        self._own = [each for each in module.parameters(recurse=False) if each.dim() > 1]
        self._forward = forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the module's own forward."""
        with self:
            return self._forward(*arguments, **named)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or multiply row by row."""
        del types
        named = kwargs or {}
        if len(args) == 2 and not named:
            if func is nn.functional.linear and self._is_part(args[1]):
                return _product(*args)
            if func in _MATMUL and self._is_part(args[1]):
                return _product(args[0], args[1].t())
        return func(*args, **named)

    def _is_part(self, tensor: Any) -> bool:
        """Return whether a tensor is a matrix in the memory of one of the parameters."""
        return (
            isinstance(tensor, Tensor)
            and tensor.dim() == 2
            and any(_memory(tensor) == _memory(each) for each in self._own)
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiply rows in float32, [..., K] -> [..., N], rounded once."""
    num_outputs, num_inputs = weight_NK.shape
    if not x.numel():
        return x.new_empty(*x.shape[:-1], num_outputs)
    panels = own_panels(weight_NK.detach().float(), None)
    rows = as_numpy(x.float().contiguous()).reshape(-1, num_inputs)
    out_RN = RowProducts(panels, num_inputs, FLOAT32).multiply(rows)
    return torch.from_numpy(out_RN).to(x.dtype).view(*x.shape[:-1], num_outputs)


def pack(model: nn.Module) -> None:
    """Let all experts outside transformers' interface multiply row by row, in place."""
    inside = {id(each) for block, _ in expert_blocks(model) for each in block.modules()}
    for module in model.modules():
        if (
            id(module) not in inside
            and any(hasattr(module, name) for name in _COUNTS)
            and not is_experts(module)
            and any(_is_matrix(each) for each in module.parameters(recurse=False))
        ):
            module.forward = RowwiseExperts(module, module.forward)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() in (2, 3) and parameter.dtype in DTYPES
