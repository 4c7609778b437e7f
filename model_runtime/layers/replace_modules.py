"""Replacement of modules in a loaded model, in place."""

from collections.abc import Callable

from torch import nn


def swap_modules(model: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module by the result of `other`; if that is None, the module stays."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            made = other(child)
            if made is not None:
                setattr(module, name, made)
