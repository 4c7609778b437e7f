"""Models get a forward of one call a step, with the bits of their own forward."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

from ropewalk.model_runtime.attention import cpu_backend
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels import fused_decode
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import MOST_ROWS
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.fused import decoder as fused_decoder
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers, program_of, restore
from ropewalk.model_runtime.layers.skip_rotation import with_globals
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.low_bits.quantise import quantise_model
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.model_runtime.tracing.operations import UntraceableError
from ropewalk.rope import Profile, Yarn
from tests.checkpoints.tiny_models import VOCAB_SIZE, in_dtype, tiny_model
from tests.doubles.engines import checkpoint_of, tiny_checkpoint
from tests.doubles.tokens import byte_tokenizer

CONFIG = EngineConfig(kv_cache_tokens=4096, max_model_len=512, page_size=16, num_state_slots=10)
# One of each kind of layer; test_fused_mixtures.py has the mixtures. Which other models get a
# forward of one call is in docs/reference/models.md, and their self-check compares its bits.
FUSED = (
    *("llama", "gemma3_text", "gpt_neox", "cohere2", "phi3", "granite", "glm4", "olmo2"),
    *("nemotron", "stablelm", "modernbert-decoder", "starcoder2", "persimmon", "exaone4"),
    *("qwen3_5_text", "lfm2"),
)
CASES = [
    *((architecture, torch.float32) for architecture in FUSED),
    *((architecture, torch.bfloat16) for architecture in ("llama", "gemma3_text", "gpt_neox")),
    ("qwen3_5_text", torch.bfloat16),
]
# Architecture -> what no kernel of ours computes.
OTHERS = {
    "apertus": "of torch",
    "lfm3": "multiply other shapes",
    "qwen2_moe": "pad of torch has no kernel",
}


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
    """A checkpoint of a tiny model; Granite's multipliers are other than one."""
    names = ("embedding", "residual", "attention", "logits")
    factors = {f"{name}_multiplier": 0.5 + at / 4 for at, name in enumerate(names[:3])}
    overrides = {**factors, "logits_scaling": 3.0} if architecture == "granite" else {}
    return checkpoint_of(in_dtype(tiny_model(architecture, **overrides), dtype))


def forward_of(checkpoint: Checkpoint) -> Any:
    """The forward that replaces the one of the model's class, or None."""
    return vars(checkpoint.model).get("forward")


def assert_refused(architecture: str, reason: str) -> None:
    """Load the model; its own forward must be kept, with a line in the log that says why."""
    with structlog.testing.capture_logs() as lines:
        assert forward_of(plain(architecture)) is None
    events = {"decoder_not_fused", "forward_not_installed"}
    assert [line["reason"] for line in lines if line["event"] in events] == [reason]


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
        parts: tuple[StatePart, ...] = ()
        if checkpoint.states:
            parts = (StatePart(len(ids), at if first else None, at),)
        return Span(ids, first, range(20 * at, 20 * at + 20), table_ids[at % 2], rows, parts)

    steps = [
        [span(0, 70, range(70))],
        [span(70, 75, range(5)), *(span(0, 40 + at, range(0), at) for at in range(1, 9))],
        [span(75, 140, range(64, 65)), span(41, 42, range(1), 1)],
        *([span(40 + at, 41 + at, range(1), at) for at in range(2, count)] for count in (3, 8)),
        [span(48, 49 + MOST_ROWS, range(3, 5), 8)],
        [span(0, 2 * MOST_ROWS, range(0), 9)],
    ]
    return [runner.run(each) for each in steps]


def check_barriers(program: Any) -> None:
    """Check that no thread reads or writes what another may be writing.

    Between two barriers, a shared slot is written by one operation or read, and not both.
    """
    written, read = set[int](), set[int]()

    def wait() -> None:
        written.clear()
        read.clear()

    for fields_F in program.fields_OF.tolist():
        code, out = fields_F[fused_decode.CODE], fields_F[fused_decode.OUT]
        inputs = [
            fields_F[name] for name in (fused_decode.FIRST, fused_decode.SECOND, fused_decode.THIRD)
        ]
        if fields_F[fused_decode.BARRIER]:
            wait()
        read |= {slot for slot in inputs if slot >= 0 and program.slots[slot].is_shared}
        assert not read & written
        if code == fused_decode.ATTEND:
            wait()  # for the cache
            read |= {slot for slot in inputs[:1] if program.slots[slot].is_shared}
        if code >= fused_decode.PRODUCT:
            assert out not in read | written
            written.add(out)
        assert (code >= fused_decode.PRODUCT) == program.slots[out].is_shared


@pytest.mark.parametrize(("architecture", "dtype"), CASES, ids=str)
def test_bits_are_those_of_the_own_forward(
    monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: torch.dtype
) -> None:
    """The compared steps hold chunks, several sequences, few rows and two tables.

    Any thread may take any share of a product, and each computes passes over rows itself.
    """
    checkpoint = plain(architecture, dtype)
    forward = forward_of(checkpoint)
    assert isinstance(forward, DecoderLayers)
    assert forward.takes_pruned(checkpoint.plans, CpuAttention)
    check_barriers(forward._program)
    found = []
    for count in (1, 3):  # torch's own number stays that of the trial of products
        monkeypatch.setattr(DecoderLayers, "_num_threads", lambda *_, count=count: count)
        found.append(answers(checkpoint))
    restore(checkpoint.model)
    own = answers(checkpoint)
    assert forward_of(checkpoint) is None
    for fused in found:
        assert all(map(torch.equal, fused, own))


@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_fails_does_not_leave_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of one thread is raised by the step, and the next step is computed."""
    checkpoint = plain("llama")
    forward = forward_of(checkpoint)
    if forward.multiplying is None:
        pytest.skip("this processor's products have no kernel for few rows")
    expected = answers(checkpoint)
    original = fused_decode.runner_for

    def failing(*kind: Any) -> Any:
        run = original(*kind)

        @jit()
        def call(  # noqa: PLR0917
            thread: int, num_threads: int, arrived: Any, addresses_TB: Any, num_rows: int,
            like: Any, step: Any,
        ) -> None:  # fmt: skip
            if thread == 1:
                raise MemoryError
            run(thread, num_threads, arrived, addresses_TB, num_rows, like, step)

        return call

    monkeypatch.setattr(fused_decode, "runner_for", failing)
    with pytest.raises(MemoryError):
        answers(checkpoint)
    monkeypatch.setattr(fused_decode, "runner_for", original)
    assert all(map(torch.equal, answers(checkpoint), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_few_bits_are_one_call_beside_a_float_head(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The head has another kind of product, so it is multiplied after the one call."""
    whole = {"num_key_value_heads": 4, "intermediate_size": 128}
    model: Any = in_dtype(tiny_model("llama", **whole), dtype)
    head = model.lm_head
    quantise_model(model, byte_tokenizer())
    model.lm_head = head
    checkpoint = checkpoint_of(model)
    assert forward_of(checkpoint).multiplying is not None
    at_once, original = [], DecoderLayers._all_at_once

    def counted(*arguments: Any, with_head: bool) -> Any:
        at_once.append(with_head)
        return original(*arguments, with_head=with_head)

    monkeypatch.setattr(DecoderLayers, "_all_at_once", counted)
    fused = answers(checkpoint)
    assert at_once == [False, False]
    restore(checkpoint.model)
    assert all(map(torch.equal, fused, answers(checkpoint)))


def test_queries_that_depend_on_their_positions_keep_their_forward() -> None:
    """A query's dependence on its position would not show at the positions of short prompts."""

    def far(_: Any, given: Any, named: Any) -> Any:
        is_far = bool((named["position_ids"] > 10_000).any())
        return (given[0] + (1.0 if is_far else 0.0), *given[1:]), named

    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(far, with_kwargs=True)
    assert forward_of(checkpoint_of(model)) is None


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_models_keep_their_own(architecture: str) -> None:
    """A forward with an operation that has no kernel is kept, and the reason names it."""
    checkpoint = tiny_checkpoint(architecture)
    assert forward_of(checkpoint) is None
    with pytest.raises(UntraceableError, match=OTHERS[architecture]):
        program_of(checkpoint.model, checkpoint.plans)


def test_what_a_trace_cannot_see_is_found_by_the_trial() -> None:
    """The layers halve their output unless they get as many tokens as the trace has."""
    model: Any = tiny_model("llama")
    for layer in model.model.layers:

        def halved(x: Tensor, *given: Any, own: Any = layer.forward, **named: Any) -> Tensor:
            out: Tensor = own(x, *given, **named)
            return out if x.shape[1] == 3 else 0.5 * out

        layer.forward = halved
    checkpoint = checkpoint_of(model)
    program_of(model, checkpoint.plans)  # raises nothing
    assert forward_of(checkpoint) is None


def test_a_layer_that_adds_an_operation_is_served_with_it() -> None:
    """Nothing is known by name: a Llama whose layers halve their output is another program."""
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        own = layer.forward
        layer.forward = lambda *given, own=own, **named: 0.5 * own(*given, **named)
    checkpoint = checkpoint_of(model)
    assert isinstance(forward_of(checkpoint), DecoderLayers)
    fused = answers(checkpoint)
    restore(checkpoint.model)
    assert all(map(torch.equal, fused, answers(checkpoint)))


def test_a_forward_that_calls_any_object_torch_is_traced() -> None:
    """Such a name need not be a module, or have a dictionary."""
    model: Any = tiny_model("llama")
    block = model.model.layers[0]
    copy = with_globals(type(block).forward, {"F": object()})
    block.forward = MethodType(copy, block)
    assert isinstance(forward_of(checkpoint_of(model)), DecoderLayers)


@pytest.mark.parametrize("architecture", ["gemma3_text", "cohere2"])
def test_windows_are_those_of_the_model(architecture: str) -> None:
    """The self-check shrinks windows, and the program must have the model's own afterwards."""
    checkpoint = tiny_checkpoint(architecture, sliding_window=40)
    forward = forward_of(checkpoint)
    fields_OF = forward._program.fields_OF
    is_read_O = fields_OF[:, fused_decode.CODE] == fused_decode.ATTEND
    assert fields_OF[is_read_O, fused_decode.WINDOW].tolist() == [40, 40, 40, 0]


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
    original = fused_decoder.run_shares

    def shifted(kernel: Any, shares: Any, fields_OF: Any, factors_OX: Any, *arguments: Any) -> None:
        original(kernel, shares, fields_OF, factors_OX + np.float32(1e-3), *arguments)

    monkeypatch.setattr(fused_decoder, "run_shares", shifted)
    assert_refused("llama", "has other bits than its modules")


def test_an_error_of_the_fused_forward_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is served by its own forward."""

    def failing(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(fused_decoder, "run_shares", failing)
    assert_refused("llama", "MemoryError: no room")


def test_a_decode_step_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few rows is one compiled call for all layers."""
    checkpoint = plain("llama")
    forward = forward_of(checkpoint)
    if forward.multiplying is None:
        pytest.skip("this processor's products have no kernel for few rows")
    calls = []
    run = fused_decoder.run_on_threads

    def counted(kernel: Any, num_threads: int, *arguments: Any, arrived: Any) -> None:
        calls.append((num_threads, arguments[3]))
        run(kernel, num_threads, *arguments, arrived=arrived)

    monkeypatch.setattr(fused_decoder, "run_on_threads", counted)
    runner: ModelRunner = build_runner(checkpoint, CONFIG)
    table_id = native_table(runner, checkpoint)
    for num_rows in (1, MOST_ROWS, MOST_ROWS + 1):
        runner.run([Span([5], 0, [at], table_id, range(1)) for at in range(num_rows)])
    assert calls == [(1, 1), (1, MOST_ROWS)]
