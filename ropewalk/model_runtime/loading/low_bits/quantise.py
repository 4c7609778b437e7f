"""Quantise a loaded model to int8, and measure how far its answers are from those before.

Shapes: T = tokens of the text, V = vocabulary, N = outputs of a weight, K = its inputs,
B = blocks of inputs, E = experts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8, PANEL
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.experts.low_bit import ExpertMatrix
from ropewalk.model_runtime.loading.low_bits.hold import (
    expert_holders,
    expert_matrices,
    hold,
    hold_experts,
    holders,
    return_freed_memory,
    storage_of,
)
from ropewalk.model_runtime.loading.low_bits.sizes import can_quantise, can_quantise_experts
from ropewalk.model_runtime.probing.untouched import logits_of, text_ids_of

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels

_MOST_TOKENS = 128
_QUANTISED_AT_ONCE = 1 << 22  # weights, so that temporary copies stay small


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a model that rounds more from the model that rounds less."""

    divergence: float  # mean Kullback-Leibler divergence of the next token, in nats
    agreement: float  # share of tokens after which both find the same token most probable
    num_tokens: int
    origin: str = "the stored weights"

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.2g} nats from {self.origin}, same most probable "
            f"token after {self.agreement:.0%} of {self.num_tokens}"
        )


def modules_for_int8(model: Any) -> tuple[list[str], list[str]]:
    """Return the weights and the modules with experts that are quantised to int8.

    Raises ModelError if no weight is or can be in few bits.
    """
    names = [
        name
        for name, each in holders(model).items()
        if can_quantise(name, tuple(each.weight.shape))
    ]
    experts = []
    for name, each in expert_holders(model).items():
        between, width = each.down_proj.shape[-2:]
        if can_quantise_experts(width, between):
            experts.append(name)
    if not (names or experts or storage_of(model).by_format):
        raise ModelError(
            f"weights: int8 needs linears with a multiple of {INT8.group} inputs and "
            f"{PANEL} outputs or more, and {type(model).__name__} has none"
        )
    return names, experts


@torch.inference_mode()
def quantise_model(model: Any, tokenizer: Any) -> Distance | None:
    """Quantise all linears, experts and the embedding that can be, in place; return the distance.

    Weights that a GGUF file stores in few bits stay as they are. If all of them do, then there is
    no distance. Raises ModelError if nothing is or can be in few bits, if a weight is too large, or
    if the model does not run.
    """
    names, experts = modules_for_int8(model)
    if not (names or experts):
        return None
    token_ids = text_ids_of(model, tokenizer)[:_MOST_TOKENS]
    before_TV = logits_of(model, token_ids)
    modules = holders(model)
    for name in names:
        hold(model, {name: _int8_panels(name, modules[name].weight.detach())})
        modules.pop(name)
    for name in experts:
        hold_experts(model, name, _int8_matrices(name, model.get_submodule(name)))
        return_freed_memory()
    return_freed_memory()
    return distance(before_TV, logits_of(model, token_ids))


def _int8_panels(name: str, weight_NK: Tensor) -> "LowBitPanels":
    """Return a weight in panels. Raises ModelError if a number is too large."""
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        MOST_MAGNITUDE,
        PanelWriter,
        int8_parts,
    )

    writer = PanelWriter(INT8, *weight_NK.shape)
    step = max(PANEL, _QUANTISED_AT_ONCE // weight_NK.shape[1] // PANEL * PANEL)
    for first in range(0, len(weight_NK), step):
        parts = int8_parts(weight_NK[first : first + step])
        if not np.isfinite(parts.factors_NB).all():
            raise ModelError(
                f"weights: int8 needs weights of at most {MOST_MAGNITUDE:.0f} in magnitude, "
                f"and {name} has a larger one"
            )
        writer.write(first, parts)
    return writer.panels


def _int8_matrices(where: str, experts: Any) -> dict[str, ExpertMatrix]:
    """Return the matrices of a layer's experts in panels, quantised one expert at a time."""
    first, second = expert_matrices(experts)
    num_parts = 2 if experts.has_gate and experts.is_concatenated else 1
    found = {}
    for name, count in ((first, num_parts), (second, 1)):
        parts_E = []
        for weight in getattr(experts, name).detach():
            rows_NK = weight.t().contiguous() if experts.is_transposed else weight
            parts = rows_NK.chunk(count)
            parts_E.append(tuple(_int8_panels(f"{where}.{name}", each) for each in parts))
        found[name] = ExpertMatrix(parts_E)
    return found


def distance(before_TV: Tensor, after_TV: Tensor) -> Distance:
    """Return how far probabilities are from those before, over the tokens of a text."""
    before_TV, after_TV = (each.double().log_softmax(-1) for each in (before_TV, after_TV))
    divergence = (before_TV.exp() * (before_TV - after_TV)).sum(-1).mean()
    agreement = (before_TV.argmax(-1) == after_TV.argmax(-1)).double().mean()
    return Distance(float(divergence), float(agreement), len(before_TV))
