"""The attention calls of a model's layers, found by running the model on a few tokens.

The model runs with random numbers instead of its weights (random_numbers.py), because zeros and
equal rows of trained weights look like another structure.

Shapes: H = query heads, K = key heads, T = tokens of the probe, D = key dimensions.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import STEP, AttentionCall, Step
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.probing.random_numbers import random_numbers

_PROBE_LEN = 3  # tokens; layers' outputs are discarded, so only their own projections matter


def text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config()


@dataclass(slots=True)
class _Probe:
    """A step that records each layer's call and returns zeros."""

    calls: dict[int, AttentionCall]

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        if layer_idx in self.calls:
            raise ModelError(f"two attention layers share the index {layer_idx}")
        self.calls[layer_idx] = call
        heads, tokens = call.query_1HTD.shape[1:3]
        return call.value_1KTV.new_zeros(1, tokens, heads, call.value_1KTV.shape[-1])


def are_equal(call: AttentionCall, other: AttentionCall) -> bool:
    return torch.equal(call.query_1HTD, other.query_1HTD) and torch.equal(
        call.key_1KTD, other.key_1KTD
    )


@torch.inference_mode()
def run_probe(model: nn.Module, step: Step, first_position: int = 0) -> None:
    """Run a patched model on a short prompt; `step` gets its attention calls. Raises ModelError."""
    device = next(model.parameters()).device
    vocabulary = text_config(model).vocab_size
    position_ids = torch.arange(first_position, first_position + _PROBE_LEN, device=device)
    try:
        with random_numbers(model):
            model(
                input_ids=torch.arange(1, 1 + _PROBE_LEN, device=device)[None] % vocabulary,
                position_ids=position_ids[None],
                use_cache=False,
                **{STEP: step},
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run with its attention replaced: "
            f"{type(error).__name__}: {error}"
        ) from error


def recorded_calls(model: nn.Module, first_position: int = 0) -> dict[int, AttentionCall]:
    """Return every attention layer's call for a short prompt; raise ModelError if there is none."""
    probe = _Probe({})
    run_probe(model, probe, first_position)
    if not probe.calls:
        raise ModelError(f"{type(model).__name__} did not call the attention it was given")
    return probe.calls
