"""The logits of a model before it is patched, which the self-check compares with.

The prompts are two short pieces of a text, or random token ids. They run alone, under a scaled
table, and with another rounding, which shows how far a correct program may be away. Sliding windows
are smaller than the long prompt, so that an ignored window changes the logits.

Shapes: T = tokens of a prompt, V = vocabulary, P = pairs of rotary dimensions.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.probing.probe import text_config
from ropewalk.model_runtime.probing.random_numbers import random_numbers
from ropewalk.model_runtime.probing.rounding import ORDERS, rounded_otherwise
from ropewalk.model_runtime.text.sample_text import SAMPLE_TEXT
from ropewalk.rope import ALL_LAYERS, NativeRope, Yarn

LONG_LEN, SHORT_LEN = 48, 29  # tokens of the two prompts
_TIMES_DRAWN = 8  # as many ids as the prompts have are drawn
_MOST_EQUAL = 4  # ids among them that may have one embedding
_WINDOW = 16  # size of every sliding window during the check
# The scaled profile: it interpolates most pairs even within 48 tokens, and has a temperature.
SCALED = Yarn(factor=4.0, original_max_position_embeddings=64)
_MIN_USEFUL = 0.8  # share of a text's tokens that have an embedding of their own
# Allowed difference: this multiple of the largest difference among runs of the untouched model that
# are rounded otherwise, but at least this fraction of the logits' standard deviation.
_TIMES_SPREAD = 10.0
# With weights, single rows may be further away: rounding decides near-ties between experts.
_COMPARED = 0.75
_MIN_SHARE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


# It tells users to install packages of CUDA for layers with states, which run untouched only here.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


class PromptIds(NamedTuple):
    """The token ids of the check's two prompts."""

    long: list[int]
    short: list[int]


@dataclass(frozen=True, slots=True)
class OriginalLogits:
    """The prompts of the check, and their logits from the original model."""

    ids: PromptIds
    long_TV: Tensor
    short_TV: Tensor
    scaled_TV: Tensor  # the long prompt under the scaled profile
    threshold: float  # largest allowed difference in a logit
    compared: float  # share of the rows that must be within the threshold


@torch.inference_mode()
def original_structure(model: nn.Module, native: NativeRope) -> OriginalLogits:
    """Run the model before it is patched, with random numbers in float32. Raises ModelError."""
    with random_numbers(model, dtype=torch.float32):
        return original_logits(model, native, is_structure=True)


@torch.inference_mode()
def original_logits(
    model: nn.Module,
    native: NativeRope,
    ids: PromptIds | None = None,
    *,
    is_structure: bool = False,
) -> OriginalLogits:
    """Run the model before it is patched. Raises ModelError if it fails.

    `ids`: the prompts; None: of random tokens. `is_structure`: the model computes in float32, with
    numbers of our own.
    """
    compared = 1.0 if is_structure else _COMPARED
    dtype = torch.float32 if is_structure else next(model.parameters()).dtype
    prompts = prompt_ids(model) if ids is None else ids

    def scaled() -> Tensor:
        with _tables_scaled(model, native):
            return logits_of(model, prompts.long)

    def plain() -> Tensor:
        return logits_of(model, prompts.long)

    rotaries = [module for module, _ in rotary_modules(model).values()]
    with windows_shrunk(model):
        *others, reference = _implemented(model)
        model.set_attn_implementation(reference)  # type: ignore[operator]
        long_TV, short_TV, scaled_TV = plain(), logits_of(model, prompts.short), scaled()
        # The prompts take turns, so that a sample costs one run.
        turns = cycle([(plain, long_TV), (scaled, scaled_TV)])
        spreads = []
        for num_parts, (run, expected_TV) in zip(ORDERS, turns, strict=False):
            with rounded_otherwise(model, rotaries, num_parts):
                spreads.append(difference(run(), expected_TV))
        for implementation, (run, expected_TV) in zip(others, turns, strict=False):
            model.set_attn_implementation(implementation)  # type: ignore[operator]
            spreads.append(difference(run(), expected_TV))
    min_threshold = _MIN_SHARE[dtype] * float(long_TV.std())
    threshold = max(_TIMES_SPREAD * max(spreads), min_threshold)
    return OriginalLogits(prompts, long_TV, short_TV, scaled_TV, threshold, compared)


def text_ids_of(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the tokens of the sample text that the model knows."""
    vocab_size = text_config(model).vocab_size
    return [each for each in tokenizer.encode(SAMPLE_TEXT) if each < vocab_size]


@torch.inference_mode()
def prompt_ids(model: Any, text_ids: Sequence[int] = ()) -> PromptIds:
    """Return the token ids of both prompts, most of them with embeddings of their own.

    Embeddings of unused tokens are often zero or all equal. A prompt of them would show nothing.
    `text_ids`: tokens of a text, which are the prompts if they suffice. Random tokens move a
    trained model's rounding several times further.
    """
    num_ids = LONG_LEN + SHORT_LEN
    text = torch.tensor(text_ids[:num_ids], dtype=torch.long)
    if len(text) == num_ids and float(_useful(model, text).float().mean()) > _MIN_USEFUL:
        return PromptIds(text[:LONG_LEN].tolist(), text[LONG_LEN:].tolist())
    generator = torch.Generator().manual_seed(0)
    vocab_size = text_config(model).vocab_size
    drawn = torch.randint(vocab_size, (_TIMES_DRAWN * num_ids,), generator=generator)
    is_useful = _useful(model, drawn)
    ids = [*drawn[is_useful].tolist(), *drawn[~is_useful].tolist()][:num_ids]
    return PromptIds(ids[:LONG_LEN], ids[LONG_LEN:])


def _useful(model: Any, ids: Tensor) -> Tensor:
    """Return which ids have an embedding that is not zero and that few other ids have."""
    known = torch.unique(ids)
    rows = model.get_input_embeddings()(known.to(next(model.parameters()).device)[None])[0]
    _, group, sizes = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    is_useful: Tensor = ((rows != 0).any(-1) & (sizes[group] <= _MOST_EQUAL)).cpu()
    return is_useful[torch.searchsorted(known, ids)]


def _implemented(model: Any) -> list[str]:
    """Return the attentions of transformers that the model accepts; the last is the reference."""
    found = []
    for implementation in _attentions(text_config(model)):
        with suppress(ValueError, ImportError):
            model.set_attn_implementation(implementation)
            found.append(implementation)
    return found


def _attentions(config: Any) -> tuple[str, ...]:
    """Return the attentions of transformers that implement the layers; the last is the reference.

    sdpa has no soft cap. transformers 5.17 leaves the cap out silently, and 5.23 raises an error.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    return ("eager", "sdpa") if softcap is None else ("eager",)


def difference(got_TV: Tensor, expected_TV: Tensor, compared: float = 1.0) -> float:
    """Return the largest difference in a logit among most rows; NaN if a logit is NaN.

    `compared`: the share of rows that count; those with the largest differences are left out.
    """
    largest_T = (got_TV - expected_TV).abs().amax(-1)
    return float(largest_T.quantile(compared, interpolation="lower"))


def rotary_modules(model: nn.Module) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """Return name -> (module, the layer types of its tables), for every rotary module."""
    found = {}
    for name, module in model.named_modules():
        buffers = [key for key, _ in module.named_buffers(recurse=False)]
        types = [
            key.removesuffix("inv_freq").removesuffix("_") or ALL_LAYERS
            for key in buffers
            if key.endswith("inv_freq") and not key.endswith("original_inv_freq")
        ]
        if types:
            found[name] = (module, tuple(types))
    return found


def logits_of(model: nn.Module, token_ids: list[int]) -> Tensor:
    """Return the float32 logits [T, V] of a plain forward."""
    device = next(model.parameters()).device
    try:
        output = model(input_ids=torch.tensor([token_ids], device=device), use_cache=False)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run untouched: {type(error).__name__}: {error}"
        ) from error
    logits_TV: Tensor = output.logits[0]
    if not bool(logits_TV.isfinite().all()):
        raise ModelError(f"{type(model).__name__} answers a short prompt with NaN or Inf")
    return logits_TV.float()


@contextmanager
def windows_shrunk(model: nn.Module) -> Iterator[None]:
    """Set every sliding window to a size below the long prompt, within the block."""
    with ExitStack() as stack:
        for owner in (text_config(model), *model.modules()):
            if type(getattr(owner, "sliding_window", None)) is int:
                stack.enter_context(_attribute(owner, "sliding_window", _WINDOW))
        yield


@contextmanager
def _tables_scaled(model: nn.Module, native: NativeRope) -> Iterator[None]:
    """Put the scaled table into the original model's rotary modules, within the block."""
    table = native.tables[native.scaled_layer_type].frequencies(SCALED)
    with ExitStack() as stack:
        for module, types in rotary_modules(model).values():
            if native.scaled_layer_type not in (*types, ALL_LAYERS):
                continue
            shared = native.scaled_layer_type == ALL_LAYERS
            prefix = "" if shared else f"{native.scaled_layer_type}_"
            # LongRoPE copies the second buffer over the first in every forward.
            for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
                buffer = getattr(module, name)
                scaled = table.inv_freq_P.to(buffer.device, buffer.dtype)
                stack.enter_context(_attribute(module, name, scaled))
            stack.enter_context(
                _attribute(module, f"{prefix}attention_scaling", table.attention_factor)
            )
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
