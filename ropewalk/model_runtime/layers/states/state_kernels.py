"""The kernels of one kind of device for layers with states: `cpu_states.py`, `gpu/states/calls.py`.

Shapes: T = flat tokens, C = channels of the convolution, V = value heads beside each other,
H = value heads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import SlotStore, StateCall
from ropewalk.model_runtime.state_shape import StateShape


class DeltaProducts(NamedTuple):
    """The results of a Gated DeltaNet layer's products, contiguous."""

    x_TC: Tensor  # queries, keys and values before the convolution
    gate_TV: Tensor
    beta_TH: Tensor  # before the sigmoid
    step_TH: Tensor  # before bias and softplus


class StateKernels(Protocol):
    """Makes the calls of layers, which a step computes over its slots."""

    @property
    def width(self) -> int:
        """Return the number of which the sizes of channels and heads must be multiples."""

    def slots(
        self, layers: Mapping[int, StateShape], num_slots: int, device: torch.device
    ) -> SlotStore:
        """Allocate slots for the states of layers. Raises RuntimeError if memory is short."""

    def delta_weights(self, module: Any) -> Any:
        """Return what the kernels need of a Gated DeltaNet module besides its linears."""

    def delta(self, products: DeltaProducts, weights: Any, num_key_heads: int) -> StateCall:
        """Return the call of a Gated DeltaNet layer."""

    def shift_weights(self, convolution: nn.Conv1d) -> Any:
        """Return what the kernels need of a short convolution."""

    def shift(self, joined_TC: Tensor, weights: Any) -> StateCall:
        """Return the call of a short convolution.

        `joined_TC`: contiguous; first gate, second gate and value beside each other.
        """
