"""The states of sequences: for each layer that has one, the last inputs and a recurrent state.

A slot holds the state of one sequence after some token, over all layers. Its numbers are float32.

Shapes: N = slots, L = inputs that are kept, C = channels, H = heads, K = dimensions of a key,
D = dimensions of a value, X = arrays of a layer, or parts of all sequences, S = sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Ints
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.model_runtime.transfer import on_device

if TYPE_CHECKING:
    from ropewalk.model_runtime.attention.batch import Batch


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

    def parts_of(self, batch: "Batch") -> Ints:
        """Return the parts of a step, int64 [X, 4]."""
        return batch.parts_X4

    @cached_property
    def addresses_LX(self) -> Ints:
        """Return the addresses of each layer's two arrays, in the order of layers."""
        arrays = (self._layers[index] for index in sorted(self._layers))
        return np.array([[part.ctypes.data for part in each] for each in arrays], np.int64)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """See `Batch.parts_X4`. All are int64; a slot of -1 is read as zeros, and is not written."""

    begin_X: Tensor
    end_X: Tensor
    read_X: Tensor
    write_X: Tensor
    first_S1: Tensor  # [S + 1], the first part of each sequence, and the number of parts
    most_tokens: int  # of a sequence

    @property
    def num_sequences(self) -> int:
        return len(self.first_S1) - 1


def device_parts(batch: "Batch", device: torch.device) -> DeviceParts:
    """Send the parts of a step to the device, or return those that the batch has there."""
    if batch.device_parts is not None:
        return batch.device_parts
    parts_X4 = batch.parts_X4
    begin_S = [place.begin for place in batch.places_S]
    first_S1 = np.append(np.searchsorted(parts_X4[:, 0], begin_S), len(parts_X4))
    joined = on_device(np.concatenate((parts_X4.T.ravel(), first_S1)), device)
    sizes = [len(parts_X4)] * 4 + [len(first_S1)]
    begin_X, end_X, read_X, write_X, first = joined.split_with_sizes(sizes)
    most_tokens = max(place.num_tokens for place in batch.places_S)
    return DeviceParts(begin_X, end_X, read_X, write_X, first, most_tokens)
