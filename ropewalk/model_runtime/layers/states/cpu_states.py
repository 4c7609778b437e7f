"""The calls of layers with states on a CPU, over its compiled kernels.

Everything between a layer's products is one kernel, in float32 and rounded once, although modules
round bfloat16 more often.

Shapes: T = flat tokens, C = channels of the convolution, V = value heads beside each other,
H = value heads, W = taps, X = parts of spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import CpuStateCall, StateOperation
from ropewalk.model_runtime.attention.state_store import LayerStates, StateStore
from ropewalk.model_runtime.cpu_kernels import fused_decode
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.states.convolution import short_convolution
from ropewalk.model_runtime.cpu_kernels.states.delta_rule import DeltaWeights, gated_delta
from ropewalk.model_runtime.cpu_kernels.states.fused_step import advance, weight_fields
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, num_threads_for, run_shares
from ropewalk.model_runtime.layers.states.convolutions import taps_of
from ropewalk.model_runtime.layers.states.state_kernels import DeltaProducts
from ropewalk.model_runtime.state_shape import StateShape

_NUMBERS_PER_SHARE = 1 << 15  # with fewer, a thread costs more time than it saves


@dataclass(frozen=True, slots=True)
class _DeltaCall:
    inputs: DeltaProducts
    weights: DeltaWeights
    num_key_heads: int

    def zeros(self) -> Tensor:
        """Return zeros in the shape of the result, [1, T, V]."""
        return torch.zeros_like(self.inputs.gate_TV)[None]

    def of(self, inputs: Sequence[Tensor]) -> "_DeltaCall":
        """Return the call with other inputs."""
        return _DeltaCall(DeltaProducts(*inputs), self.weights, self.num_key_heads)

    def operation(self) -> StateOperation:
        """Return the operation for the one call of a step."""
        weights = self.weights
        num_taps, num_channels = weights.taps_WC.shape
        num_heads, dim = len(weights.rate_H), len(weights.norm_D)
        key_dim = (num_channels - num_heads * dim) // (2 * self.num_key_heads)
        weights_F = weight_fields(
            taps=weights.taps_WC.ctypes.data,
            num_taps=num_taps,
            num_channels=num_channels,
            rates=weights.rate_H.ctypes.data,
            step_biases=weights.step_bias_H.ctypes.data,
            norm=weights.norm_D.ctypes.data,
        )
        fields = {
            fused_decode.CODE: fused_decode.DELTA,
            fused_decode.ADDRESS: weights_F.ctypes.data,
            fused_decode.LENGTH: len(weights_F),
            fused_decode.NUM_HEADS: num_heads,
            fused_decode.NUM_KEY_HEADS: self.num_key_heads,
            fused_decode.DIM: key_dim,
            fused_decode.VALUE_DIM: dim,
        }
        return StateOperation(fields, (float(weights.eps), 0.0), (weights_F, weights), advance)

    def advance(self, states: LayerStates, parts_X4: NDArray[np.int64]) -> Tensor:
        """Return what the output's linear reads, [1, T, V]."""
        x_TC, gate_TV, beta_TH, step_TH = self.inputs
        inputs = (
            as_numpy(x_TC),
            0,
            as_numpy(gate_TV),
            0,
            beta_TH.float().numpy(),
            step_TH.float().numpy(),
        )
        out_TV = np.empty(gate_TV.shape, inputs[0].dtype)
        weights: Any = tuple(self.weights)  # plain, as the kernel takes them
        work = len(x_TC) * states.state_NHKD[0].size
        shares = even_shares(self.num_key_heads, 1, _num_shares(work))
        arguments = self.num_key_heads, parts_X4, inputs, weights, *states, out_TV
        run_shares(gated_delta, shares, *arguments)
        return as_tensor(out_TV, gate_TV.dtype)[None]


@dataclass(frozen=True, slots=True)
class _ShiftCall:
    joined_TC: Tensor  # first gate, second gate and value beside each other
    taps_WC: Floats
    bias_C: Floats

    def zeros(self) -> Tensor:
        """Return zeros in the shape of the result, [1, T, C]."""
        return self.joined_TC.new_zeros(1, len(self.joined_TC), len(self.bias_C))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Return both gates and the value."""
        return (self.joined_TC,)

    def of(self, inputs: Sequence[Tensor]) -> "_ShiftCall":
        """Return the call with other inputs."""
        (joined_TC,) = inputs
        return _ShiftCall(joined_TC, self.taps_WC, self.bias_C)

    def operation(self) -> StateOperation:
        """Return the operation for the one call of a step."""
        num_taps, num_channels = self.taps_WC.shape
        weights_F = weight_fields(
            taps=self.taps_WC.ctypes.data,
            num_taps=num_taps,
            num_channels=num_channels,
            biases=self.bias_C.ctypes.data,
        )
        fields = {
            fused_decode.CODE: fused_decode.SHIFT,
            fused_decode.ADDRESS: weights_F.ctypes.data,
            fused_decode.LENGTH: len(weights_F),
        }
        keeps = (weights_F, self.taps_WC, self.bias_C)
        return StateOperation(fields, (0.0, 0.0), keeps, advance)

    def advance(self, states: LayerStates, parts_X4: NDArray[np.int64]) -> Tensor:
        """Return gate * (convolution of (gate * value)), [1, T, C]."""
        joined_TC = as_numpy(self.joined_TC)
        num_tokens, num_channels = len(joined_TC), len(self.bias_C)
        out_TC = np.empty((num_tokens, num_channels), joined_TC.dtype)
        inputs_TC = np.empty_like(out_TC)
        shares = even_shares(num_channels, WIDTH, _num_shares(out_TC.size))
        weights = self.taps_WC, self.bias_C, states.tail_NLC
        run_shares(short_convolution, shares, joined_TC, 0, parts_X4, *weights, inputs_TC, out_TC)
        return as_tensor(out_TC, self.joined_TC.dtype)[None]


def _num_shares(num_numbers: int) -> int:
    return num_threads_for(num_numbers // _NUMBERS_PER_SHARE)


class CpuStates:
    """The kernels of a CPU for layers with states (state_kernels.py)."""

    width = WIDTH

    def slots(
        self, layers: Mapping[int, StateShape], num_slots: int, device: torch.device
    ) -> StateStore:
        """Allocate slots. Raises RuntimeError if memory is short."""
        del device
        return StateStore(layers, num_slots)

    def delta_weights(self, module: Any) -> DeltaWeights:
        """Return the numbers of a Gated DeltaNet module that are not products."""
        return DeltaWeights(
            taps_of(module.conv1d).numpy(),
            # In float32, as the module does, so that large numbers end alike.
            -module.A_log.detach().float().exp().double().numpy(),
            module.dt_bias.detach().double().numpy().copy(),
            module.norm.weight.detach().float().numpy().copy(),
            np.float32(module.norm.variance_epsilon),
        )

    def delta(
        self, products: DeltaProducts, weights: DeltaWeights, num_key_heads: int
    ) -> CpuStateCall:
        """Return the call of a layer."""
        return _DeltaCall(products, weights, num_key_heads)

    def shift_weights(self, convolution: nn.Conv1d) -> tuple[Floats, Floats]:
        """Return taps and bias of a short convolution."""
        bias_C = np.zeros(convolution.out_channels, np.float32)
        if convolution.bias is not None:
            bias_C = convolution.bias.detach().float().numpy().copy()
        return taps_of(convolution).numpy(), bias_C

    def shift(self, joined_TC: Tensor, weights: tuple[Floats, Floats]) -> CpuStateCall:
        """Return the call of a layer; `joined_TC` is contiguous."""
        return _ShiftCall(joined_TC, *weights)
