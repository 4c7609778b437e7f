"""The attention calls of a model's layers, found by running the model on a few tokens.

The model runs with random numbers instead of its weights (random_numbers.py), because zeros and
equal rows of trained weights look like another structure.

Shapes: H = query heads, K = key heads, T = tokens of the probe, D = key dimensions.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    AttentionCall,
    AttentionContext,
    StateCall,
)
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

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:  # noqa: ARG002
        return call.zeros()

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
def run_probe(
    model: nn.Module, step: AttentionContext, first_position: int = 0, first_token: int = 1
) -> None:
    """Run a patched model on a short prompt; `step` gets its attention calls. Raises ModelError."""
    device = next(model.parameters()).device
    vocabulary = text_config(model).vocab_size
    input_ids_1T = torch.arange(1, 1 + _PROBE_LEN, device=device)[None] % vocabulary
    input_ids_1T[0, 0] = first_token % vocabulary
    position_ids = torch.arange(first_position, first_position + _PROBE_LEN, device=device)
    try:
        with random_numbers(model):
            model(
                input_ids=input_ids_1T,
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


def mixing_class(model: nn.Module) -> str | None:
    """Return the class of the first module that mixes tokens beside attention; None: none does.

    The model runs twice, without attention and with another first token. A module mixes tokens if
    the last token's inputs are the same in both runs and its outputs are not.
    """
    one, other = (_last_rows(model, first_token) for first_token in (1, 5))
    for (name, *rows), (_, *other_rows) in zip(one, other, strict=False):
        (has_same_inputs, has_same_outputs) = map(_are_alike, rows, other_rows)
        if has_same_inputs and not has_same_outputs:
            return name
    return None


def _are_alike(rows: list[Tensor], others: list[Tensor]) -> bool:
    return len(rows) == len(others) and all(
        row.shape == other.shape and torch.allclose(row, other, equal_nan=True)
        for row, other in zip(rows, others, strict=True)
    )


def _last_rows(model: nn.Module, first_token: int) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return class, inputs and outputs of every call of a module, of the last token only."""
    found: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def note(module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        inputs = _rows([*arguments, *named.values()])
        outputs = _rows(output if isinstance(output, tuple) else [output])
        if inputs and outputs:
            found.append((type(module).__name__, inputs, outputs))

    with ExitStack() as stack:
        for module in model.modules():
            hook = module.register_forward_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        run_probe(model, _Probe({}), first_token=first_token)
    return found


def _rows(things: Iterable[Any]) -> list[Tensor]:
    """Return the last token's row of every tensor that has one for each token."""
    return [
        each[0, -1].float()
        for each in things
        if isinstance(each, Tensor) and each.dim() > 1 and each.shape[:2] == (1, _PROBE_LEN)
    ]
