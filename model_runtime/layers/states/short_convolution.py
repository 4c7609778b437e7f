"""LFM 2's short convolutions over the last inputs that a slot keeps.

Shapes: T = flat tokens, C = channels, X = parts of spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    StateOperation,
    StateStep,
    StepMissingError,
)
from ropewalk.model_runtime.attention.state_store import LayerStates
from ropewalk.model_runtime.cpu_kernels import fused_decode
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.states.convolution import short_convolution
from ropewalk.model_runtime.cpu_kernels.states.fused_step import advance, weight_fields
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, parallel_for
from ropewalk.model_runtime.layers.states.taps import Kept, is_causal, taps_of
from ropewalk.model_runtime.state_shape import StateShape

_NUMBERS_PER_SHARE = 1 << 15  # with fewer, starting a thread costs more time than it saves


@dataclass(frozen=True, slots=True)
class _Call:
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

    def of(self, inputs: Sequence[Tensor]) -> "_Call":
        """Return the call with other inputs."""
        (joined_TC,) = inputs
        return _Call(joined_TC, self.taps_WC, self.bias_C)

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
        weights = self.taps_WC, self.bias_C, states.tail_NLC
        parallel_for(
            lambda share: short_convolution(
                joined_TC, 0, parts_X4, *weights, share, inputs_TC, out_TC
            ),
            even_shares(num_channels, WIDTH, _num_shares(out_TC.size)),
        )
        return as_tensor(out_TC, self.joined_TC.dtype)[None]


def _num_shares(num_numbers: int) -> int:
    return min(torch.get_num_threads(), num_numbers // _NUMBERS_PER_SHARE)


class ShortConvolution:
    """The forward of a layer `out_proj(gate * convolution(gate * value))`."""

    def __init__(self, module: Any, shape: StateShape) -> None:
        self.module, self.shape = module, shape
        self._kept: Kept[tuple[Floats, Floats]] = Kept()

    @classmethod
    def of(cls, module: Any) -> "ShortConvolution | None":
        """Return the forward of a module with these parts; None if it is something else."""
        parts = dict(module.named_children())
        if set(parts) != {"conv", "in_proj", "out_proj"}:
            return None
        num_channels = parts["out_proj"].in_features
        if parts["in_proj"].out_features != 3 * num_channels:
            return None
        if not is_causal(parts["conv"], num_channels):
            return None
        return cls(module, StateShape(parts["conv"].kernel_size[0] - 1, num_channels))

    def forward(self, hidden_states: Tensor, *_: Any, **named: Any) -> Tensor:
        """Return the layer's output, [1, T, hidden]."""
        step: StateStep | None = named.get(STEP)
        if step is None:
            raise StepMissingError(self.module)
        joined_1TC = self.module.in_proj(hidden_states)
        call = _Call(joined_1TC[0].contiguous(), *self._weights())
        output: Tensor = self.module.out_proj(step.advance(self.module.layer_idx, call))
        return output

    def _weights(self) -> tuple[Floats, Floats]:
        convolution: nn.Conv1d = self.module.conv
        bias = convolution.bias
        sources = (convolution.weight,) if bias is None else (convolution.weight, bias)
        kept = self._kept.of(sources)
        if kept is not None:
            return kept
        bias_C = np.zeros(self.shape.num_channels, np.float32)
        if bias is not None:
            bias_C = bias.detach().float().numpy().copy()
        return self._kept.keep(sources, (taps_of(convolution), bias_C))
