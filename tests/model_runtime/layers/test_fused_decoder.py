"""Models of plain decoder layers get a shorter forward, with the bits of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention import cpu_backend
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import FLOAT32, MOST_ROWS
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers import fused_decoder
from ropewalk.model_runtime.layers.fused_decoder import DecoderLayers, restore
from ropewalk.model_runtime.layers.last_layer import pruned_layer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile, Yarn
from tests.engines import checkpoint_of, tiny_checkpoint
from tests.tiny_models import VOCAB_SIZE, in_dtype, tiny_model

CONFIG = EngineConfig(kv_cache_tokens=4096, max_model_len=512, page_size=16)
PLAIN = ["llama", "qwen2", "qwen3", "mistral", "seed_oss"]
OTHERS = ["cohere", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "olmo2", "qwen3_moe"]


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use three threads for a weight of any size, even on a machine with fewer cores."""
    monkeypatch.setattr(fused_decoder, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(cpu_backend, "_SERIAL_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def plain(architecture: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """A checkpoint of a model with plain decoder layers."""
    window: dict[str, Any] = {"sliding_window": None} if architecture == "mistral" else {}
    return checkpoint_of(in_dtype(tiny_model(architecture, **window), dtype))


def forward_of(checkpoint: Checkpoint) -> Any:
    """The forward that replaces the one of the model's class, or None."""
    return vars(checkpoint.model).get("forward")


def native_table(runner: ModelRunner, checkpoint: Checkpoint) -> int:
    """The table_id of the table that the checkpoint was trained with."""
    native = checkpoint.native
    return runner.table_id(Profile(native.tables[native.scaled_layer_type].scaling))


def answers(checkpoint: Checkpoint) -> list[Tensor]:
    """Logits of steps of many kinds: chunks, several sequences, few rows, two tables."""
    runner = build_runner(checkpoint, CONFIG)
    yarn = Yarn(factor=4.0, original_max_position_embeddings=64)
    table_ids = [native_table(runner, checkpoint), runner.table_id(Profile(yarn))]

    def span(first: int, behind: int, rows: Sequence[int], at: int = 0) -> Span:
        ids = [(7 * place + 3 * at) % VOCAB_SIZE for place in range(first, behind)]
        return Span(ids, first, range(20 * at, 20 * at + 20), table_ids[at % 2], rows)

    steps = [
        [span(0, 70, range(70))],
        [span(70, 75, range(5)), *(span(0, 40 + at, range(0), at) for at in range(1, 9))],
        [span(75, 140, range(64, 65)), span(41, 42, range(1), 1)],
        *([span(40 + at, 41 + at, range(1), at) for at in range(2, count)] for count in (3, 8)),
        [span(48, 49 + MOST_ROWS, range(3, 5), 8)],
        [span(0, 2 * MOST_ROWS, range(0), 9)],
    ]
    return [runner.run(each) for each in steps]


@pytest.mark.sampled(drawn=3, by="dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", PLAIN)
def test_bits_are_those_of_the_own_forward(architecture: str, dtype: torch.dtype) -> None:
    """The compared steps hold chunks, several sequences, few rows and two tables."""
    checkpoint = plain(architecture, dtype)
    assert isinstance(forward_of(checkpoint), DecoderLayers)
    assert pruned_layer(checkpoint.model) is not None
    fused = answers(checkpoint)
    restore(checkpoint.model)
    own = answers(checkpoint)
    assert forward_of(checkpoint) is None
    for got_RV, expected_RV in zip(fused, own, strict=True):
        assert got_RV.shape == expected_RV.shape
        assert torch.equal(got_RV, expected_RV)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_threads_change_no_bit(architecture: str, dtype: torch.dtype) -> None:
    """Any thread may take any share of the work, except that one thread norms the heads."""
    checkpoint = plain(architecture, dtype)
    assert isinstance(forward_of(checkpoint), DecoderLayers)
    found = [answers(checkpoint) for _ in range(3)]
    restore(checkpoint.model)
    for fused in found:
        assert all(map(torch.equal, fused, answers(checkpoint)))


@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_fails_does_not_leave_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of one thread is raised by the step, and the next step is computed."""
    checkpoint = plain("llama")
    forward = forward_of(checkpoint)
    if forward._fields_LW is None:
        pytest.skip("this processor's products have no kernel for few rows")
    expected = answers(checkpoint)
    original = fused_decoder.runner_for

    def failing(*kind: Any) -> Any:
        run = original(*kind)

        def call(thread: int, *arguments: Any) -> None:
            if thread == 1:
                raise MemoryError
            run(thread, *arguments)

        return call

    monkeypatch.setattr(fused_decoder, "runner_for", failing)
    with pytest.raises(MemoryError):
        answers(checkpoint)
    monkeypatch.setattr(fused_decoder, "runner_for", original)
    assert all(map(torch.equal, answers(checkpoint), expected))


def test_queries_that_depend_on_their_positions_keep_their_forward() -> None:
    """A query's dependence on its position would not show at the positions of short prompts."""

    def far(_: Any, given: Any, named: Any) -> Any:
        is_far = bool((named["position_ids"] > 10_000).any())
        return (given[0] + (1.0 if is_far else 0.0), *given[1:]), named

    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(far, with_kwargs=True)
    assert forward_of(checkpoint_of(model)) is None


@pytest.mark.sampled(drawn=3)
@pytest.mark.parametrize("architecture", OTHERS)
def test_other_models_keep_their_own(architecture: str) -> None:
    """The kept models have other norms, experts, windows, capped logits or a scaled residual."""
    special = {"residual_multiplier": 0.5} if architecture == "granite" else {}
    assert forward_of(tiny_checkpoint(architecture, **special)) is None


def test_a_model_that_only_looks_like_one_keeps_its_own() -> None:
    """The model's parts have the same names and kinds, but its layers return half their output."""
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        own = layer.forward
        layer.forward = lambda *given, own=own, **named: 0.5 * own(*given, **named)
    assert forward_of(checkpoint_of(model)) is None


def test_another_reading_of_the_cache_is_not_passed_over() -> None:
    """If a runner's plans are replaced, then the logits must follow the new plans."""
    checkpoint = plain("llama")
    runner = build_runner(checkpoint, CONFIG)
    table_id = native_table(runner, checkpoint)
    spans = [Span(list(range(40)), 0, range(3), table_id, range(40))]
    rotated_RV = runner.run(spans)
    runner._plans = {
        index: replace(plan, layer_type=None) for index, plan in checkpoint.plans.items()
    }
    assert float((runner.run(spans) - rotated_RV).abs().max()) > 0.1


def test_a_mistake_shows_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong compiled forward is refused; a check that passes any answer would serve it."""
    original = fused_decoder.normalize

    def shifted(x_RD: Any, scale_D: Any, eps: Any, out_RD: Any) -> None:
        original(x_RD, scale_D, eps, out_RD)
        out_RD[-1, -1] *= 1.01

    monkeypatch.setattr(fused_decoder, "normalize", shifted)
    assert forward_of(plain("llama")) is None


def test_a_decode_step_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few rows is one compiled call for all layers."""
    checkpoint = plain("llama")
    forward = forward_of(checkpoint)
    if forward._fields_LW is None:
        pytest.skip("this processor's products have no kernel for few rows")
    calls = []
    run = fused_decoder.runner_for(FLOAT32, np.empty((1, 2, 16, 16), np.float32))

    def counted(thread: int, num_threads: int, *arguments: Any) -> None:
        calls.append((thread, num_threads, len(arguments[1])))
        run(thread, num_threads, *arguments)

    monkeypatch.setattr(fused_decoder, "runner_for", lambda *_: counted)
    runner: ModelRunner = build_runner(checkpoint, CONFIG)
    table_id = native_table(runner, checkpoint)
    for num_rows in (1, MOST_ROWS, MOST_ROWS + 1):
        runner.run([Span([5], 0, [at], table_id, range(1)) for at in range(num_rows)])
    assert calls == [(0, 1, 1), (0, 1, MOST_ROWS)]
