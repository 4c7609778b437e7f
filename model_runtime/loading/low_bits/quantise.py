"""Quantise a loaded model to int8, and measure how far its answers are from those before.

Shapes: T = tokens of the text, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runtime.cpu_kernels.low_bits.formats import INT8, PANEL
from model_runtime.errors import ModelError
from model_runtime.loading.low_bits.hold import (
    hold,
    holders,
    quantisable,
    return_freed_memory,
    storage_of,
)
from model_runtime.probing.untouched import logits_of, text_ids_of

_MOST_TOKENS = 128
_QUANTISED_AT_ONCE = 1 << 22  # weights, so that temporary copies stay small


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a quantised model from the model that was stored."""

    divergence: float  # mean Kullback-Leibler divergence of the next token, in nats
    agreement: float  # share of tokens after which both find the same token most probable
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.2g} nats from the stored weights, same most probable "
            f"token after {self.agreement:.0%} of {self.num_tokens}"
        )


@torch.inference_mode()
def quantise_model(model: Any, tokenizer: Any) -> Distance | None:
    """Quantise all linears and the embedding that can be, in place; return the distance.

    Weights that a GGUF file stores in few bits stay as they are. If all of them do, then there is
    no distance. Raises ModelError if nothing is or can be in few bits, if a weight is too large, or
    if the model does not run.
    """
    from model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        MOST_MAGNITUDE,
        PanelWriter,
        int8_parts,
    )

    names = quantisable(model)
    if not names and storage_of(model).by_format:
        return None
    if not names:
        raise ModelError(
            f"weights: int8 needs linears with a multiple of {INT8.group} inputs and "
            f"{PANEL} outputs or more, and {type(model).__name__} has none"
        )
    token_ids = text_ids_of(model, tokenizer)[:_MOST_TOKENS]
    before_TV = logits_of(model, token_ids)
    modules = holders(model)
    for name in names:
        weight_NK = modules[name].weight.detach()
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
        del weight_NK
        hold(model, {name: writer.panels})
        modules.pop(name)
    return_freed_memory()
    return distance(before_TV, logits_of(model, token_ids))


def distance(before_TV: Tensor, after_TV: Tensor) -> Distance:
    """Return how far probabilities are from those before, over the tokens of a text."""
    before_TV, after_TV = (each.double().log_softmax(-1) for each in (before_TV, after_TV))
    divergence = (before_TV.exp() * (before_TV - after_TV)).sum(-1).mean()
    agreement = (before_TV.argmax(-1) == after_TV.argmax(-1)).double().mean()
    return Distance(float(divergence), float(agreement), len(before_TV))
