"""The calls of layers with states on a GPU, and their slots there.

Shapes: T = flat tokens, C = channels of the convolution, V = value heads beside each other,
H = value heads, W = taps, N = slots, L = inputs that a slot keeps, K and D = dimensions of a key
and of a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.paged_attention import StateCall
from ropewalk.model_runtime.attention.state_store import DeviceParts, device_parts
from ropewalk.model_runtime.gpu.states.convolution import convolve, new_rows
from ropewalk.model_runtime.gpu.states.delta_rule import delta_rule, norm_and_gate
from ropewalk.model_runtime.layers.states.convolutions import taps_of
from ropewalk.model_runtime.layers.states.state_kernels import DeltaProducts
from ropewalk.model_runtime.state_shape import StateShape


class SlotTensors(NamedTuple):
    """One layer's part of all slots, in float32."""

    tail_NLC: Tensor  # the last inputs, oldest first
    state_NHKD: Tensor


class DeviceStates:
    """The slots of all layers, on a GPU."""

    def __init__(
        self, layers: Mapping[int, StateShape], num_slots: int, device: torch.device
    ) -> None:
        """Allocate the slots. Raises RuntimeError if memory is short."""
        self.num_slots = num_slots
        self._device = device
        self._layers = {
            index: SlotTensors(
                torch.zeros(num_slots, each.num_kept, each.num_channels, device=device),
                torch.zeros(num_slots, each.num_heads, each.key_dim, each.value_dim, device=device),
            )
            for index, each in layers.items()
        }

    def layer(self, layer_idx: int) -> SlotTensors:
        """Return a layer's slots."""
        return self._layers[layer_idx]

    def parts_of(self, batch: Batch) -> DeviceParts:
        """Return the parts of a step on the device."""
        return device_parts(batch, self._device)


class _DeltaWeights(NamedTuple):
    """The weights of one layer that are not products, in float32."""

    taps_WC: Tensor
    rate_H: Tensor  # -exp(A_log): the log of a decay, for a step of one
    step_bias_H: Tensor
    norm_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class _DeltaCall:
    products: DeltaProducts
    weights: _DeltaWeights
    num_key_heads: int

    def zeros(self) -> Tensor:
        """Return zeros in the shape of the result, [1, T, V]."""
        return torch.zeros_like(self.products.gate_TV)[None]

    def advance(self, states: SlotTensors, parts: DeviceParts) -> Tensor:
        """Return what the output's linear reads, [1, T, V]."""
        x_TC, gate_TV, beta_TH, step_TH = self.products
        taps_WC, *rates, norm_D, eps = self.weights
        mixed_TC = new_rows(x_TC, x_TC.shape[1], torch.float32)
        convolve(x_TC, taps_WC, states.tail_NLC, parts, mixed_TC)
        out_TV = new_rows(x_TC, gate_TV.shape[1], torch.float32)
        delta_rule(
            mixed_TC, beta_TH, step_TH, (rates[0], rates[1]), states.state_NHKD, parts,
            self.num_key_heads, out_TV,
        )  # fmt: skip
        result_TV = torch.empty_like(gate_TV)
        norm_and_gate(out_TV, gate_TV, norm_D, eps, result_TV)
        return result_TV[None]


@dataclass(frozen=True, slots=True)
class _ShiftCall:
    joined_TC: Tensor  # first gate, second gate and value beside each other
    taps_WC: Tensor
    bias_C: Tensor

    def zeros(self) -> Tensor:
        """Return zeros in the shape of the result, [1, T, C]."""
        return self.joined_TC.new_zeros(1, len(self.joined_TC), len(self.bias_C))

    def advance(self, states: SlotTensors, parts: DeviceParts) -> Tensor:
        """Return gate * (convolution of (gate * value)), [1, T, C]."""
        first_TC, second_TC, value_TC = self.joined_TC.chunk(3, dim=-1)
        x_TC = first_TC * value_TC
        out_TC = torch.empty_like(x_TC)
        gate = self.bias_C, second_TC
        convolve(x_TC, self.taps_WC, states.tail_NLC, parts, out_TC, gate)
        return out_TC[None]


class GpuStates:
    """The kernels of a GPU for layers with states (layers/states/state_kernels.py)."""

    width = 1

    def slots(
        self, layers: Mapping[int, StateShape], num_slots: int, device: torch.device
    ) -> DeviceStates:
        """Allocate slots. Raises RuntimeError if memory is short."""
        return DeviceStates(layers, num_slots, device)

    def delta_weights(self, module: Any) -> _DeltaWeights:
        """Return the numbers of a Gated DeltaNet module that are not products."""
        return _DeltaWeights(
            taps_of(module.conv1d),
            -module.A_log.detach().float().exp(),
            module.dt_bias.detach().float(),
            module.norm.weight.detach().float(),
            module.norm.variance_epsilon,
        )

    def delta(
        self, products: DeltaProducts, weights: _DeltaWeights, num_key_heads: int
    ) -> StateCall:
        """Return the call of a layer."""
        return _DeltaCall(products, weights, num_key_heads)

    def shift_weights(self, convolution: nn.Conv1d) -> tuple[Tensor, Tensor]:
        """Return taps and bias of a short convolution."""
        bias, taps_WC = convolution.bias, taps_of(convolution)
        if bias is None:
            return taps_WC, taps_WC.new_zeros(taps_WC.shape[1])
        return taps_WC, bias.detach().float()

    def shift(self, joined_TC: Tensor, weights: tuple[Tensor, Tensor]) -> StateCall:
        """Return the call of a layer; `joined_TC` is contiguous."""
        return _ShiftCall(joined_TC, *weights)
