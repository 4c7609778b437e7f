"""Qwen's Gated DeltaNet layers over the states that a slot keeps.

The module's own linears compute its products. Everything between them is one kernel
(`delta_rule.py`), in float32 and rounded once, although the module rounds bfloat16 more often.

Shapes: T = flat tokens, C = channels of the convolution, V = value heads beside each other,
H = value heads, X = parts of spans.
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
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.states.delta_rule import DeltaWeights, gated_delta
from ropewalk.model_runtime.cpu_kernels.states.fused_step import advance, weight_fields
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, parallel_for
from ropewalk.model_runtime.layers.states.taps import Kept, is_causal, taps_of
from ropewalk.model_runtime.state_shape import StateShape

_SPLIT = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}  # qwen3_5
_JOINED = {"in_proj_qkvz", "in_proj_ba"}  # qwen3_next
_OTHERS = {"conv1d", "norm", "out_proj"}
_NUMBERS_PER_SHARE = 1 << 15  # of states: with fewer, a thread costs more time than it saves


@dataclass(frozen=True, slots=True)
class _Call:
    x_TC: Tensor
    gate_TV: Tensor
    beta_TH: Tensor
    step_TH: Tensor
    weights: DeltaWeights
    num_key_heads: int

    def zeros(self) -> Tensor:
        """Return zeros in the shape of the result, [1, T, V]."""
        return torch.zeros_like(self.gate_TV)[None]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values, the gate, beta and the step."""
        return self.x_TC, self.gate_TV, self.beta_TH, self.step_TH

    def of(self, inputs: Sequence[Tensor]) -> "_Call":
        """Return the call with other inputs."""
        x_TC, gate_TV, beta_TH, step_TH = inputs
        return _Call(x_TC, gate_TV, beta_TH, step_TH, self.weights, self.num_key_heads)

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
        inputs = (
            as_numpy(self.x_TC),
            0,
            as_numpy(self.gate_TV),
            0,
            self.beta_TH.float().numpy(),
            self.step_TH.float().numpy(),
        )
        out_TV = np.empty(self.gate_TV.shape, inputs[0].dtype)
        weights: Any = tuple(self.weights)  # plain, as the kernel takes them
        work = len(self.x_TC) * states.state_NHKD[0].size
        parallel_for(
            lambda share: gated_delta(
                share, self.num_key_heads, parts_X4, inputs, weights, *states, out_TV
            ),
            even_shares(
                self.num_key_heads, 1, min(torch.get_num_threads(), work // _NUMBERS_PER_SHARE)
            ),
        )
        return as_tensor(out_TV, self.gate_TV.dtype)[None]


class GatedDelta:
    """The forward of a layer with a convolution, the gated delta rule and a gated norm."""

    def __init__(self, module: Any, shape: StateShape, num_key_heads: int) -> None:
        self.module, self.shape = module, shape
        self._num_key_heads = num_key_heads
        self._kept: Kept[DeltaWeights] = Kept()

    @classmethod
    def of(cls, module: Any) -> "GatedDelta | None":
        """Return the forward of a module with these parts; None if it is something else."""
        parts = dict(module.named_children())
        if set(parts) not in (_SPLIT | _OTHERS, _JOINED | _OTHERS):
            return None
        own = {name for name, _ in module.named_parameters(recurse=False)}
        if own != {"A_log", "dt_bias"} or getattr(module, "activation", None) != "silu":
            return None
        num_heads, num_key_heads = module.num_v_heads, module.num_k_heads
        key_dim, dim = module.head_k_dim, module.head_v_dim
        num_channels = 2 * num_key_heads * key_dim + num_heads * dim
        if not (
            is_causal(parts["conv1d"], num_channels)
            and parts["conv1d"].bias is None
            and num_heads % num_key_heads == 0
            and key_dim % WIDTH == dim % WIDTH == 0
            and isinstance(getattr(parts["norm"], "variance_epsilon", None), float)
        ):
            return None
        num_kept = parts["conv1d"].kernel_size[0] - 1
        shape = StateShape(num_kept, num_channels, num_heads, key_dim, dim)
        return cls(module, shape, num_key_heads)

    def forward(self, hidden_states: Tensor, *_: Any, **named: Any) -> Tensor:
        """Return the layer's output, [1, T, hidden]."""
        step: StateStep | None = named.get(STEP)
        if step is None:
            raise StepMissingError(self.module)
        x, gate, beta, step_ = (each.contiguous() for each in self._products(hidden_states))
        call = _Call(x, gate, beta, step_, self._weights(), self._num_key_heads)
        output: Tensor = self.module.out_proj(step.advance(self.module.layer_idx, call))
        return output

    def _products(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values before the convolution, the gate, beta and the step."""
        module = self.module
        if hasattr(module, "in_proj_qkv"):
            x, gate = module.in_proj_qkv(hidden_states), module.in_proj_z(hidden_states)
            return (
                x[0],
                gate[0],
                module.in_proj_b(hidden_states)[0],
                module.in_proj_a(hidden_states)[0],
            )
        joined, both = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        query, key, value, gate, beta, step = module.fix_query_key_value_ordering(joined, both)
        x = torch.cat([each[0].flatten(1) for each in (query, key, value)], dim=-1)
        return x, gate[0].flatten(1), beta[0], step[0]

    def _weights(self) -> DeltaWeights:
        module = self.module
        convolution: nn.Conv1d = module.conv1d
        sources = (convolution.weight, module.A_log, module.dt_bias, module.norm.weight)
        kept = self._kept.of(sources)
        if kept is not None:
            return kept
        made = DeltaWeights(
            taps_of(convolution),
            # In float32, as the module does, so that large numbers end alike.
            -module.A_log.detach().float().exp().double().numpy(),
            module.dt_bias.detach().double().numpy().copy(),
            module.norm.weight.detach().float().numpy().copy(),
            np.float32(module.norm.variance_epsilon),
        )
        return self._kept.keep(sources, made)
