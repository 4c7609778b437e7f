"""Find the layers of a model that keep states, and let a step advance them.

A layer is recognised by the names and sizes of its parts. That is not proof of what it computes. So
the self-check compares the model's logits, over several sequences, chunks and single tokens.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ropewalk.model_runtime.layers.states.gated_delta import GatedDelta
from ropewalk.model_runtime.layers.states.short_convolution import ShortConvolution
from ropewalk.model_runtime.layers.states.state_kernels import StateKernels
from ropewalk.model_runtime.state_shape import StateShape

StateLayer = GatedDelta | ShortConvolution


def take_states(model: nn.Module, kernels: StateKernels) -> dict[int, StateShape]:
    """Let a step advance the states of a model's layers, in place; return their shapes by layer."""
    found = dict(_state_layers(model, kernels))
    for each in found.values():
        # The instance's attribute hides the forward of the class.
        each.module.forward = each.forward
    return {index: each.shape for index, each in found.items()}


def _state_layers(model: nn.Module, kernels: StateKernels) -> Iterator[tuple[int, StateLayer]]:
    for module in model.modules():
        index: Any = getattr(module, "layer_idx", None)
        if type(index) is not int:
            continue
        for kind in (GatedDelta, ShortConvolution):
            made = kind.of(module, kernels)
            if made is not None:
                yield index, made
                break
