"""The states of sequences: for each layer that has one, the last inputs and a recurrent state.

A slot holds the state of one sequence after some token, over all layers. Its numbers are float32.

Shapes: N = slots, L = inputs that are kept, C = channels, H = heads, K = dimensions of a key,
D = dimensions of a value, X = arrays of a layer.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Ints
from ropewalk.model_runtime.state_shape import StateShape


class LayerStates(NamedTuple):
    """One layer's part of all slots."""

    tail_NLC: Floats  # the last inputs, oldest first
    state_NHKD: Floats


class StateStore:
    """The slots of all layers, on a CPU. Memory is taken from the system when it is first used."""

    def __init__(self, layers: Mapping[int, StateShape], num_slots: int) -> None:
        """Allocate the slots. Raises RuntimeError if memory is short."""
        self.num_slots = num_slots
        self._layers = {
            index: LayerStates(
                torch.zeros(num_slots, each.num_kept, each.num_channels).numpy(),
                torch.zeros(num_slots, each.num_heads, each.key_dim, each.value_dim).numpy(),
            )
            for index, each in layers.items()
        }

    def layer(self, layer_idx: int) -> LayerStates:
        """Return a layer's slots."""
        return self._layers[layer_idx]

    @cached_property
    def addresses_LX(self) -> Ints:
        """Return the addresses of each layer's two arrays, in the order of layers."""
        arrays = (self._layers[index] for index in sorted(self._layers))
        return np.array([[part.ctypes.data for part in each] for each in arrays], np.int64)
