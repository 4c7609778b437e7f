"""Qwen's Gated DeltaNet layers over the states that a slot keeps.

The module's own linears compute its products. The kernels of the device (state_kernels.py) compute
everything between them.
"""

from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import STEP, StateContext, StepMissingError
from ropewalk.model_runtime.layers.states.convolutions import Kept, is_causal
from ropewalk.model_runtime.layers.states.state_kernels import DeltaProducts, StateKernels
from ropewalk.model_runtime.state_shape import StateShape

_SPLIT = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}  # qwen3_5
_JOINED = {"in_proj_qkvz", "in_proj_ba"}  # qwen3_next
_OTHERS = {"conv1d", "norm", "out_proj"}


class GatedDelta:
    """The forward of a layer with a convolution, the gated delta rule and a gated norm."""

    def __init__(
        self, module: Any, shape: StateShape, num_key_heads: int, kernels: StateKernels
    ) -> None:
        self.module, self.shape = module, shape
        self._num_key_heads = num_key_heads
        self._kernels = kernels
        self._kept: Kept[Any] = Kept()

    @classmethod
    def of(cls, module: Any, kernels: StateKernels) -> "GatedDelta | None":
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
            is_causal(parts["conv1d"], num_channels, kernels.width)
            and parts["conv1d"].bias is None
            and num_heads % num_key_heads == 0
            and key_dim % kernels.width == dim % kernels.width == 0
            and isinstance(getattr(parts["norm"], "variance_epsilon", None), float)
        ):
            return None
        num_kept = parts["conv1d"].kernel_size[0] - 1
        shape = StateShape(num_kept, num_channels, num_heads, key_dim, dim)
        return cls(module, shape, num_key_heads, kernels)

    def forward(self, hidden_states: Tensor, *_: Any, **named: Any) -> Tensor:
        """Return the layer's output, [1, T, hidden]."""
        step: StateContext | None = named.get(STEP)
        if step is None:
            raise StepMissingError(self.module)
        products = DeltaProducts(*(each.contiguous() for each in self._products(hidden_states)))
        call = self._kernels.delta(products, self._weights(), self._num_key_heads)
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

    def _weights(self) -> Any:
        module = self.module
        sources = (module.conv1d.weight, module.A_log, module.dt_bias, module.norm.weight)
        kept = self._kept.of(sources)
        if kept is not None:
            return kept
        return self._kept.keep(sources, self._kernels.delta_weights(module))
