"""Compare the logits of the patched model with those of the original model, at every load.

The original model runs first and is then patched in place, so the weights are never held twice.
The prompts are short random token ids. During the check, sliding windows are smaller than the long
prompt, so that an ignored window changes the logits.

Shapes: T = tokens of a prompt, V = vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_runtime.attention.backends import new_store
from model_runtime.attention.paged_attention import LayerPlan
from model_runtime.batch import Span
from model_runtime.cache.rope_tables import RopeTables
from model_runtime.errors import ModelError
from model_runtime.layers.fused_decoder import DecoderLayers, restore
from model_runtime.layers.last_layer import trimmed_layer, untrim
from model_runtime.layers.probe import text_config
from model_runtime.loading.patch_model import rotary_modules
from model_runtime.runner.model_runner import ModelRunner
from rope import ALL_LAYERS, NativeRope, Profile, Yarn

_LONG, _SHORT = 48, 29  # tokens of the two prompts
_WINDOW = 16  # size of every sliding window during the check
_PAGE_SIZE = 16
_FIRST_CHUNK, _DECODED = 31, 7  # pieces of the long prompt: 31, then 10, then 7 single tokens
_FEW_ROWS = 2  # only these last tokens have logits in one of the checks
# The scaled profile: it interpolates most pairs even within 48 tokens, and has a temperature.
_SCALED = Yarn(factor=4.0, original_max_position_embeddings=64)
# Allowed difference: this multiple of the model's own difference between eager and sdpa attention,
# but at least this fraction of the logits' standard deviation.
_TIMES_OWN_DIFFERENCE = 5.0
_LEAST_SHARE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Answers:
    """The logits of the original model."""

    long_ids: list[int]
    short_ids: list[int]
    long_TV: Tensor
    short_TV: Tensor
    scaled_TV: Tensor  # the long prompt under the scaled profile
    threshold: float  # largest allowed difference in a logit


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a self-check that passed."""

    difference: float  # largest difference in a logit
    threshold: float
    bitwise: bool  # same bits alone, in a batch, in chunks and token by token


@torch.inference_mode()
def untouched_answers(model: nn.Module, native: NativeRope) -> Answers:
    """Run the model before it is patched. Raises ModelError if it fails."""
    config = text_config(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (_LONG + _SHORT,), generator=generator).tolist()
    long_ids, short_ids = ids[:_LONG], ids[_LONG:]
    with _windows_shrunk(model):
        answers = []
        for implementation in _attentions(config):
            try:
                model.set_attn_implementation(implementation)  # type: ignore[operator]
            except (ValueError, ImportError):
                continue
            plain = [_ask(model, long_ids), _ask(model, short_ids)]
            with _tables_scaled(model, native):
                answers.append([*plain, _ask(model, long_ids)])
    long_TV, short_TV, scaled_TV = answers[-1]
    pairs = zip(answers[0], answers[-1], strict=True)
    own_difference = max(float((eager - sdpa).abs().max()) for eager, sdpa in pairs)
    least = _LEAST_SHARE[next(model.parameters()).dtype] * float(long_TV.std())
    threshold = max(_TIMES_OWN_DIFFERENCE * own_difference, least)
    return Answers(long_ids, short_ids, long_TV, short_TV, scaled_TV, threshold)


def _attentions(config: Any) -> tuple[str, ...]:
    """Return the attentions of transformers that implement the layers; the last is the reference.

    sdpa has no soft cap. transformers 5.17 leaves the cap out silently, and 5.23 raises an error.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    return ("eager", "sdpa") if softcap is None else ("eager",)


@torch.inference_mode()
def check(
    model: nn.Module,
    plans: Mapping[int, LayerPlan],
    native: NativeRope,
    expected: Answers,
    simpler: DecoderLayers | None = None,
) -> Report:
    """Run the patched model on the same prompts. Raises ModelError if a difference is too large.

    If a trimmed last layer (last_layer.py) fails, then the layer is restored. A `simpler` forward
    replaces the model's own forward if it gives the same bits.
    """
    parameter = next(model.parameters())
    pages = list(range(-(-_LONG // _PAGE_SIZE)))
    other_pages = [len(pages) + page for page in pages]
    store = new_store(plans, 2 * len(pages), _PAGE_SIZE, parameter.dtype, parameter.device)
    tables = RopeTables(native, _PAGE_SIZE, _LONG, parameter.device)
    runner = ModelRunner(model, plans, store, tables, _PAGE_SIZE)
    native_slot = tables.slot(Profile(native.tables[native.scaled_layer_type].scaling))
    scaled_slot = tables.slot(Profile(_SCALED))

    def span(ids: list[int], first: int, where: list[int], slot: int = native_slot) -> Span:
        return Span(ids, first, where, slot, range(len(ids)))

    long_ids, short_ids = expected.long_ids, expected.short_ids
    second = _LONG - _DECODED
    results: dict[str, tuple[Tensor, Tensor]] = {}
    with _windows_shrunk(model):
        alone_TV = _run(model, runner, [span(long_ids, 0, pages)])
        results["one prompt"] = alone_TV, expected.long_TV
        scaled_TV = _run(model, runner, [span(long_ids, 0, pages, scaled_slot)])
        results["a scaled table"] = scaled_TV, expected.scaled_TV
        both_TV = _run(
            model,
            runner,
            [span(long_ids[:_FIRST_CHUNK], 0, pages), span(short_ids, 0, other_pages)],
        )
        results["two sequences in one flat batch"] = (
            both_TV[_FIRST_CHUNK:],
            expected.short_TV,
        )
        pieces = [both_TV[:_FIRST_CHUNK]]
        pieces.append(
            _run(model, runner, [span(long_ids[_FIRST_CHUNK:second], _FIRST_CHUNK, pages)])
        )
        results["a prompt in two chunks"] = torch.cat(pieces), expected.long_TV[:second]
        pieces += [
            _run(model, runner, [span([long_ids[at]], at, pages)]) for at in range(second, _LONG)
        ]
        results["decode steps"] = torch.cat(pieces), expected.long_TV
        are_bitwise = torch.equal(torch.cat(pieces), alone_TV)
        if trimmed_layer(model) is not None:
            few_RV = _few_rows(runner, long_ids, other_pages, native_slot)
            whole_RV = alone_TV[-_FEW_ROWS:]
            if few_RV is None or not _difference(few_RV, whole_RV) <= expected.threshold:
                untrim(model)
            else:
                are_bitwise = are_bitwise and torch.equal(few_RV, whole_RV)
        if simpler is not None:
            runner = ModelRunner(model, plans, store, tables, _PAGE_SIZE)  # trimmed or not
            _simplify(model, simpler, runner, span(long_ids, 0, pages))
    worst = 0.0
    for name, (got_TV, expected_TV) in results.items():
        worst = max(worst, _compare(type(model).__name__, name, got_TV, expected_TV, expected))
    return Report(worst, expected.threshold, are_bitwise)


def _simplify(model: nn.Module, simpler: DecoderLayers, runner: ModelRunner, whole: Span) -> None:
    """Replace the model's forward by a simpler one, if both give the same bits."""

    def span(first: int, behind: int, rows: Sequence[int]) -> Span:
        return whole._replace(
            token_ids=whole.token_ids[first:behind], first_position=first, logit_rows=rows
        )

    second = _LONG - _DECODED
    decode = span(second, second + 1, range(1))
    asked = [
        [whole],
        [span(0, _FIRST_CHUNK, range(_FEW_ROWS))],
        [span(_FIRST_CHUNK, second, range(second - _FIRST_CHUNK))],
        [decode],
        [decode, decode],
    ]

    def ask() -> list[Tensor]:
        return [runner.run(spans) for spans in asked]

    own = ask()
    model.forward = simpler
    try:
        is_same = all(map(torch.equal, ask(), own))
    except Exception:  # noqa: BLE001  # parts that look like others
        is_same = False
    if not is_same:
        restore(model)


def _few_rows(
    runner: ModelRunner, token_ids: list[int], pages: list[int], slot: int
) -> Tensor | None:
    """Return logits of the last tokens only; None if the model raises an error."""
    first, second = token_ids[:_FIRST_CHUNK], token_ids[_FIRST_CHUNK:]
    rows = range(len(second) - _FEW_ROWS, len(second))
    try:
        runner.run([Span(first, 0, pages, slot, range(0))])
        return runner.run([Span(second, _FIRST_CHUNK, pages, slot, rows)])
    except Exception:  # noqa: BLE001  # whatever a model's code does with rows that it misses
        return None


def _difference(got_TV: Tensor, expected_TV: Tensor) -> float:
    return float((got_TV - expected_TV).abs().max())


def _compare(
    model_name: str, case: str, got_TV: Tensor, expected_TV: Tensor, answers: Answers
) -> float:
    difference = _difference(got_TV, expected_TV)
    if not difference <= answers.threshold:  # NaN fails too
        raise ModelError(
            f"{model_name} fails its self-check on {case}: a logit differs by {difference:.3g} "
            f"from the untouched model's, {answers.threshold:.3g} is allowed"
        )
    return difference


def _run(model: nn.Module, runner: ModelRunner, spans: list[Span]) -> Tensor:
    try:
        return runner.run(spans)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run over a paged cache: "
            f"{type(error).__name__}: {error}"
        ) from error


def _ask(model: nn.Module, token_ids: list[int]) -> Tensor:
    """Return the float32 logits [T, V] of a plain forward."""
    device = next(model.parameters()).device
    try:
        answer = model(input_ids=torch.tensor([token_ids], device=device), use_cache=False)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run untouched: {type(error).__name__}: {error}"
        ) from error
    logits_TV: Tensor = answer.logits[0]
    if not bool(logits_TV.isfinite().all()):
        raise ModelError(f"{type(model).__name__} answers a short prompt with NaN or Inf")
    return logits_TV.float()


@contextmanager
def _windows_shrunk(model: nn.Module) -> Iterator[None]:
    """Set every sliding window to a size below the long prompt, within the block."""
    with ExitStack() as stack:
        for owner in (text_config(model), *model.modules()):
            if type(getattr(owner, "sliding_window", None)) is int:
                stack.enter_context(_attribute(owner, "sliding_window", _WINDOW))
        yield


@contextmanager
def _tables_scaled(model: nn.Module, native: NativeRope) -> Iterator[None]:
    """Put the scaled table into the original model's rotary modules, within the block."""
    table = native.tables[native.scaled_layer_type].frequencies(_SCALED)
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
