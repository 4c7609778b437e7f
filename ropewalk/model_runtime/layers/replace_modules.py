"""Replacement of modules in a loaded model, in place."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.activations import ACT2CLS


class Replacement(nn.Module):
    """A module in the place of another; attributes that it has not are the original's."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple, so that it is no module of the model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_original":
                raise
            return getattr(self._original[0], name)


def swap_modules(model: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module by the result of `other`; if that is None, the module stays."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            made = other(child)
            if made is not None:
                setattr(module, name, made)


def activation_classes() -> tuple[type[nn.Module], ...]:
    entries: list[Any] = list(ACT2CLS.values())
    return tuple(entry[0] if isinstance(entry, tuple) else entry for entry in entries)
