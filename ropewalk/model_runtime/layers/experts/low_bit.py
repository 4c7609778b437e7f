"""The experts of a layer in few bits, as a module of an ordinary model with the widened weights.

The self-check runs it before the experts are packed. It widens one expert at a time, and
`lay_out.py` replaces it once the model is patched. Nothing here imports numba before a forward
runs.

Shapes: R = rows, C = choices of a row, E = experts, P = panels of an expert, K = inputs,
N = outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.layers.joined_linears import placeholder
from ropewalk.model_runtime.layers.replace_modules import Replacement

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the experts of a layer, as transformers' interface has them."""
    marks = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
    return all(hasattr(module, mark) for mark in marks) and hasattr(module, "down_proj")


def has_experts(model: nn.Module) -> bool:
    """Return whether any module has the experts of a layer."""
    return any(map(is_experts, model.modules()))


class ExpertMatrix(NamedTuple):
    """One matrix of all experts of a layer."""

    # Panels of each expert; gates and ups are two parts, so that each begins with a panel.
    parts_E: Sequence[tuple["LowBitPanels", ...]]

    @property
    def num_inputs(self) -> int:
        """Return the inputs of each product."""
        return self.parts_E[0][0].num_inputs

    @property
    def num_bytes(self) -> int:
        """Return the size of all panels."""
        return sum(part.memory.nbytes for parts in self.parts_E for part in parts)


class LowBitExperts(Replacement):
    """The experts of a layer whose weights are stored in few bits."""

    def __init__(self, original: Any, matrices: Mapping[str, ExpertMatrix]) -> None:
        """Keep the panels, by the names of the original's parameters, which are freed."""
        super().__init__(original)
        self.matrices = matrices
        for name in matrices:
            setattr(original, name, placeholder(getattr(original, name)))

    @property
    def first_name(self) -> str:
        """Return the name of the first product's matrix."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    def biases(self) -> list[Tensor]:
        """Return the parameters that stay floats."""
        own: Any = self._original[0]
        return [each for name, each in own.named_parameters() if name not in self.matrices]

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each row, [R, K], [R, C], [R, C] -> [R, K]."""
        out_RK = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            between = self._between(self._linear(self.first_name, expert, x[rows]))
            part = self._linear("down_proj", expert, between).float()
            out_RK.index_add_(0, rows, part * top_k_weights[rows, places, None])
        return out_RK.to(x.dtype)

    def _between(self, both: Tensor) -> Tensor:
        own: Any = self._original[0]
        found: Tensor = own._apply_gate(both) if own.has_gate else own.act_fn(both)  # noqa: SLF001
        return found

    def _linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
            plain_product,
        )

        parts = self.matrices[name].parts_E[expert]
        out = torch.cat([plain_product(each, x) for each in parts], dim=-1)
        if self.has_bias:
            out += getattr(self._original[0], f"{name}_bias")[expert]
        return out

    def with_random_numbers(
        self, generator: torch.Generator, dtype: torch.dtype | None
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a forward with experts that are all equal, for a probe (random_numbers.py)."""
        matrices = []
        for name in (self.first_name, "down_proj"):
            parts = self.matrices[name].parts_E[0]
            num_outputs, num_inputs = sum(each.num_outputs for each in parts), parts[0].num_inputs
            drawn = torch.randn(num_outputs + num_inputs, generator=generator)
            # Each row begins one number further on, so that layers together take no memory.
            matrix = drawn.as_strided((num_outputs, num_inputs), (1, 1))
            matrices.append((matrix, num_inputs**-0.5))

        def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            del top_k_index
            (first, scale), (second, other_scale) = matrices
            both = nn.functional.linear(x.float(), first * scale)
            out = nn.functional.linear(self._between(both), second * other_scale)
            return (out * top_k_weights.float().sum(-1, keepdim=True)).to(dtype or x.dtype)

        return forward
