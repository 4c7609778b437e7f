"""Attention layers of a patched model that skip the identity rotation.

In a patched model, rotary modules return cos = 1 and sin = 0 (patch_model.py). The layers still
multiply by cos, rotate pairs by sin and add, which is about ten small operations per layer without
an effect. Modelling code does this in a function that it finds by name in its module,
`apply_rotary_pos_emb(q, k, cos, sin, ...)`.

Here each attention layer gets a copy of its own forward. In the copy's globals, that name is a
function that returns queries and keys unchanged. The module itself is not changed, so other models
in the process rotate as before.

Names do not prove that the copies compute the same. So patch_model.py compares the layers' calls.
"""

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_NAME = "apply_rotary_pos_emb"
_FIRST_PARAMETERS = ("q", "k", "cos", "sin")


def spare_rotation(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Remove the rotation from the layers that call it by name, and return those layers."""
    copies: dict[FunctionType, FunctionType] = {}  # one for all layers of a class
    spared = []
    for layer in layers:
        forward = type(layer).forward
        if isinstance(forward, FunctionType) and _rotates_by_name(forward):
            if forward not in copies:
                copies[forward] = with_globals(forward, {_NAME: _as_they_are})
            # The instance's attribute hides the forward of the class.
            layer.forward = MethodType(copies[forward], layer)
            spared.append(layer)
    return spared


def restore_rotation(layers: Iterable[nn.Module]) -> None:
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


def with_globals(function: FunctionType, replaced: dict[str, Any]) -> FunctionType:
    """Return a copy of a function, with some globals replaced."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
