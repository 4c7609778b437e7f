"""How far rounding alone moves a model's logits, so that the self-check can allow for it.

The untouched model runs again with its sums in another order: a linear adds the products of parts
of its inputs, last part first, and the angles of its rotation have an error of float32. Every run
is a sample of what another correct program would answer. Weights with outliers move logits by
thousands of times more than others do, and the samples show it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from model_runtime.probing.random_numbers import is_any_linear

# Parts of the inputs of a linear, for each sample.
ORDERS = (2, 3, 5)
_ROUNDING = 2.0**-24  # of an angle in float32, relative


@contextmanager
def rounded_otherwise(
    model: nn.Module, rotary_modules: list[nn.Module], num_parts: int
) -> Iterator[None]:
    """Let an untouched model compute the same with another rounding, within the block."""
    with ExitStack() as stack:
        for module in model.modules():
            # A linear that computes with random numbers has a few terms, which round too little.
            if is_any_linear(module) and "forward" not in vars(module):
                stack.callback(vars(module).pop, "forward")
                module.forward = _in_parts(module, num_parts)
        for module in rotary_modules:
            hook = module.register_forward_hook(_moved_angles(num_parts))
            stack.callback(hook.remove)
        yield


def _in_parts(linear: Any, num_parts: int) -> Callable[[Tensor], Tensor]:
    """Return a linear's forward that adds the products of parts of its inputs."""
    own = linear.forward
    num_parts = min(num_parts, linear.in_features)
    edges = [linear.in_features * part // num_parts for part in range(num_parts + 1)]
    parts = [slice(begin, end) for begin, end in pairwise(edges)][::-1]

    def product(x: Tensor, part: slice) -> Tensor:
        if type(linear).forward is nn.Linear.forward:
            # Faster than a linear, for which oneDNN makes code for each layout.
            rows = torch.mm(x.reshape(-1, x.shape[-1])[:, part], linear.weight[:, part].t())
            return rows.view(*x.shape[:-1], -1)
        kept = torch.zeros_like(x)
        kept[..., part] = x[..., part]
        out: Tensor = own(kept)
        return out if linear.bias is None else out - linear.bias.to(out)

    def forward(x: Tensor) -> Tensor:
        out = product(x, parts[0])
        for part in parts[1:]:
            out = out + product(x, part)
        return out if linear.bias is None else out + linear.bias.to(out)

    return forward


def _moved_angles(seed: int) -> Callable[..., Any]:
    """Return a hook that moves the angle at each position by up to its rounding error."""
    generator = torch.Generator().manual_seed(seed)

    def move(_module: nn.Module, _inputs: Any, tables: Any) -> Any:
        table = tables if isinstance(tables, Tensor) else tables[0]
        positions_T1 = torch.arange(table.shape[-2])[:, None]
        shift_TP = torch.rand(table.shape[-2:], generator=generator) * 2 - 1
        shift_TP = (shift_TP * positions_T1 * _ROUNDING).to(table.device)
        if isinstance(tables, Tensor):
            return tables * torch.complex(torch.ones_like(shift_TP), shift_TP)
        cos, sin = (each.float() for each in tables)
        moved = cos - shift_TP * sin, sin + shift_TP * cos
        return tuple(each.to(table.dtype) for each in moved)

    return move
