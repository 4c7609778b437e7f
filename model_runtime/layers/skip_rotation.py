"""Attention layers of a taken-over model that do not compute the identity rotation.

A model whose rotary modules answer cos = 1 and sin = 0 (patch_model.py) still multiplies by the
one, turns pairs for the other, and adds: some ten small operations a layer that change nothing.
Modelling code does it in a function that it finds by name in its module,
`apply_rotary_pos_emb(q, k, cos, sin, ...)`. Here each attention layer gets a copy of its own
forward in whose globals that name is a function that returns queries and keys as they are. The
module itself is not touched, so other models of the process rotate as before.

Whether the copies do the same is not concluded from names: patch_model.py compares what layers ask.
"""

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_NAME = "apply_rotary_pos_emb"
_FIRST_PARAMETERS = ("q", "k", "cos", "sin")


def spare_rotation(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the attention layers that no longer call their modelling code's rotation."""
    copies: dict[FunctionType, FunctionType] = {}  # layers of one class share theirs
    spared = []
    for layer in layers:
        forward = type(layer).forward
        if isinstance(forward, FunctionType) and _rotates_by_name(forward):
            if forward not in copies:
                copies[forward] = _with_globals(forward, {_NAME: _as_they_are})
            # In the instance's own dictionary, where it hides the class's.
            layer.forward = MethodType(copies[forward], layer)
            spared.append(layer)
    return spared


def restore_rotation(layers: Iterable[nn.Module]) -> None:
    """Give layers back the forward of their class."""
    for layer in layers:
        del layer.forward


def _rotates_by_name(forward: FunctionType) -> bool:
    rotation = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or not isinstance(rotation, FunctionType):
        return False
    code = rotation.__code__
    return code.co_varnames[: code.co_argcount][: len(_FIRST_PARAMETERS)] == _FIRST_PARAMETERS


def _as_they_are(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q, k


def _with_globals(function: FunctionType, replaced: dict[str, Any]) -> FunctionType:
    """The same code and defaults, with other globals."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
