"""Activations that modules call as functions of torch, with rows that do not depend on the batch.

`RowwiseActivation` replaces modules. Some classes call `torch.sigmoid` or `F.silu` by name instead,
such as the output gate of Qwen 3.5's attention. Their forward gets a copy, in whose globals these
functions are replaced. Only models with states are changed, so that others keep their bits.
"""

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ropewalk.model_runtime.layers.packed_linear import RowwiseActivation
from ropewalk.model_runtime.layers.skip_rotation import with_globals


class Namespace:
    """A module of functions, with some of them replaced."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.sigmoid = RowwiseActivation(nn.Sigmoid())
        self.silu = RowwiseActivation(nn.SiLU())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


_REPLACED = {"torch": Namespace(torch), "F": Namespace(nn.functional)}
# Those that the copies call, for a trace.
CALLED_BY_NAME = tuple(
    each for functions in _REPLACED.values() for each in (functions.sigmoid, functions.silu)
)
_FUNCTIONS = {"sigmoid", "silu"}


def use_rowwise_functions(model: nn.Module) -> None:
    """Replace the functions in the forward of every module that names them, in place."""
    copies: dict[FunctionType, FunctionType] = {}  # one for all modules of a class
    for module in model.modules():
        forward: Any = vars(module).get("forward", type(module).forward)
        function = forward.__func__ if isinstance(forward, MethodType) else forward
        if not isinstance(function, FunctionType) or not _names_one(function):
            continue
        if function not in copies:
            copies[function] = with_globals(function, dict(_REPLACED))
        module.forward = MethodType(copies[function], module)


def _names_one(function: FunctionType) -> bool:
    names = set(function.__code__.co_names)
    originals = {"torch": torch, "F": nn.functional}
    return bool(names & _FUNCTIONS) and any(
        name in names and function.__globals__.get(name) is original
        for name, original in originals.items()
    )
