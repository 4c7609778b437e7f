"""LFM 2's short convolutions over the last inputs that a slot keeps."""

from typing import Any

from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import STEP, StateContext, StepMissingError
from ropewalk.model_runtime.layers.states.convolutions import Kept, is_causal
from ropewalk.model_runtime.layers.states.state_kernels import StateKernels
from ropewalk.model_runtime.state_shape import StateShape


class ShortConvolution:
    """The forward of a layer `out_proj(gate * convolution(gate * value))`."""

    def __init__(self, module: Any, shape: StateShape, kernels: StateKernels) -> None:
        self.module, self.shape, self._kernels = module, shape, kernels
        self._kept: Kept[Any] = Kept()

    @classmethod
    def of(cls, module: Any, kernels: StateKernels) -> "ShortConvolution | None":
        """Return the forward of a module with these parts; None if it is something else."""
        parts = dict(module.named_children())
        if set(parts) != {"conv", "in_proj", "out_proj"}:
            return None
        num_channels = parts["out_proj"].in_features
        if parts["in_proj"].out_features != 3 * num_channels:
            return None
        if not is_causal(parts["conv"], num_channels, kernels.width):
            return None
        return cls(module, StateShape(parts["conv"].kernel_size[0] - 1, num_channels), kernels)

    def forward(self, hidden_states: Tensor, *_: Any, **named: Any) -> Tensor:
        """Return the layer's output, [1, T, hidden]."""
        step: StateContext | None = named.get(STEP)
        if step is None:
            raise StepMissingError(self.module)
        joined_1TC = self.module.in_proj(hidden_states)
        call = self._kernels.shift(joined_1TC[0].contiguous(), self._weights())
        output: Tensor = self.module.out_proj(step.advance(self.module.layer_idx, call))
        return output

    def _weights(self) -> Any:
        convolution: nn.Conv1d = self.module.conv
        bias = convolution.bias
        sources = (convolution.weight,) if bias is None else (convolution.weight, bias)
        kept = self._kept.of(sources)
        if kept is not None:
            return kept
        return self._kept.keep(sources, self._kernels.shift_weights(convolution))
