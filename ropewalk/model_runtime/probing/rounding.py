"""The spread of rounding in a model's logits, which the self-check allows for.

The untouched model runs again with its sums in another order: a linear adds the products of parts
of its inputs, last part first, and the angles of its rotation have an error of float32. If it has
layers with states, then its embeddings have such an error, too, because no order of a linear's sums
shows how those layers round; numbers of bfloat16 do not move by so little. Every run is a sample of
what another correct program would answer. Weights with outliers move logits by thousands of times
more than others do, and the samples show it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Parts of the inputs of a linear, for each sample.
ORDERS = (2, 3, 5)
_ROUNDING = 2.0**-24  # in float32, relative


@contextmanager
def rounded_otherwise(
    model: nn.Module, rotary_modules: Iterable[nn.Module], num_parts: int
) -> Iterator[None]:
    """Let an untouched model compute the same with another rounding, within the block."""
    with ExitStack() as stack:
        stack.enter_context(_OtherOrder(num_parts))
        for module in rotary_modules:
            hook = module.register_forward_hook(_moved_angles(num_parts))
            stack.callback(hook.remove)
        if any(isinstance(module, nn.Conv1d) for module in model.modules()):
            embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
            hook = embeddings.register_forward_hook(_moved_numbers(num_parts))
            stack.callback(hook.remove)
        yield


class _OtherOrder(TorchFunctionMode):
    """Linears add the products of parts of their inputs."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or multiply in parts in its place."""
        del types
        if func is nn.functional.linear:
            return _in_parts(self._num_parts, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _in_parts(num_parts: int, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's name
    """Return a linear's output [..., N] of inputs [..., K], summed in another order."""
    num_inputs = weight.shape[-1]
    num_parts = min(num_parts, num_inputs)
    edges = [num_inputs * part // num_parts for part in range(num_parts + 1)]
    rows_RK = input.reshape(-1, num_inputs)
    out_RN: Tensor | None = None
    for first, end in reversed(list(pairwise(edges))):
        # Not a linear, for which oneDNN would make code for each layout.
        part_RN = torch.mm(rows_RK[:, first:end], weight[:, first:end].t())
        out_RN = part_RN if out_RN is None else out_RN + part_RN
    assert out_RN is not None
    if bias is not None:
        out_RN = out_RN + bias
    return out_RN.view(*input.shape[:-1], len(weight))


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


def _moved_numbers(seed: int) -> Callable[..., Any]:
    """Return a hook that moves every output by up to two rounding errors of float32."""
    generator = torch.Generator().manual_seed(seed)

    def move(_module: nn.Module, _inputs: Any, numbers: Tensor) -> Tensor:
        shifts = (torch.rand(numbers.shape, generator=generator) * 4 - 2).to(numbers.device)
        return (numbers.float() * (1 + shifts * _ROUNDING)).to(numbers.dtype)

    return move
