"""Modules of a loaded model exchanged for others, in place."""

from collections.abc import Callable

from torch import nn


def swap_modules(model: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put what `other` makes of a module in its place; None: the module stays."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            made = other(child)
            if made is not None:
                setattr(module, name, made)
