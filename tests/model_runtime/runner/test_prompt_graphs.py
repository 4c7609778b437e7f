"""Steps with prompts that are replayed answer like queued ones; kernels are interpreted.

The model's forward is the list of launches that a GPU runs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.prompt_groups import PaddedPrompts
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.engine.build_engine import captured_tokens
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.launch import is_interpreted
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward
from ropewalk.model_runtime.gpu.program.trace import traced
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.model_runtime.runner import prompt_graphs
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.prompt_graphs import MOST_TOKENS, most_prompts, prompt_sizes
from ropewalk.rope import Linear, Profile, ReRope, Unscaled
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.recorded_runners import CONFIG, SPARE, Again, Conversations, capture

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="tests/gpu replays CUDA graphs")
PLAIN, LONGER = Profile(Unscaled()), Profile(Linear(factor=2.0))
SIZES = [16, 18]


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[ModelRunner]:
    """Two runners of one model, of which the second captures steps. Empty pages have NaN."""
    monkeypatch.setattr(prompt_graphs, "LEAST_TOKENS", SIZES[0])
    monkeypatch.setattr(prompt_graphs, "MOST_PROMPTS", 4)
    name, num_layers = getattr(request, "param", ("llama", 1))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    model: Any = tiny_model(name, num_hidden_layers=num_layers, **heads)
    native = read_native_rope(model)
    plans = patch_model(model, native)
    model.forward = FlatForward(model, traced(model, plans), plans)
    cpu, page_size = torch.device("cpu"), CONFIG.page_size
    made = []
    for _ in range(2):
        layout = CacheLayout(plans, torch.float32, page_size)
        store = KVCache(layout, SPARE + 1, cpu, row_keys=True)
        for layer_idx in plans:
            for pages in store.pages(layer_idx):
                pages.fill_(float("nan"))
        tables = RopeTables(native, page_size, CONFIG.max_model_len, cpu, 4)
        for profile in (PLAIN, LONGER):
            tables.id_of(profile)
        made.append(ModelRunner(model, plans, store, tables, page_size, backend=TritonAttention))
    return made


@pytest.mark.parametrize("runners", [("gemma2", 2)], ids=["windows"], indirect=True)
def test_replayed_prompts_answer_as_queued_ones(runners: list[ModelRunner]) -> None:
    """Prompts, chunks behind contexts and without logits, and scored tokens, beside decodes."""
    record = Again()
    capture(runners[1], record, max_rows=4, max_prompt_tokens=SIZES[-1])
    graphs = runners[1]._prompt_graphs
    assert graphs is not None
    assert sorted(graphs._captured) == SIZES
    talk = Conversations(runners, [PLAIN, LONGER, PLAIN, LONGER])
    steps: list[tuple[dict[int, int], dict[int, int]]] = [
        ({0: 16}, {}),  # it is compared with the queued step
        ({1: 13, 0: 1}, {1: 0}),
        ({1: 3, 2: 12, 0: 1}, {}),
        ({0: 1, 3: 8, 1: 1, 2: 5}, {2: 0}),
        ({3: 2, 0: 16}, {3: 2}),  # of another size
        ({0: 1, 1: 1, 2: 1, 3: 1}, {}),
    ]
    for step, num_logits in steps:
        expected, got = talk.step(step, num_logits)
        assert len(got) == sum(num_logits.get(index, 1) for index in step)
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-4)
    assert record.num_replayed == len(steps)
    assert {size for size, each in graphs._captured.items() if each.is_proven} == {16, 18}
    for layer_idx in runners[0]._plans:
        for one, other in zip(*(each.store.pages(layer_idx) for each in runners), strict=True):
            kept = one[:SPARE], other[:SPARE]
            torch.testing.assert_close(*kept, atol=3e-5, rtol=1e-4, equal_nan=True)


def test_a_size_that_differs_is_queued(
    runners: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that shows it has the logits of the queued one, and the log has a line."""
    record = Again()
    capture(runners[1], record, max_rows=4, max_prompt_tokens=SIZES[-1])
    monkeypatch.setattr(PaddedPrompts, "refill", lambda *_: None)
    talk = Conversations(runners, [PLAIN, PLAIN])
    with capture_logs() as lines:
        expected, got = talk.step({0: 15})
    torch.testing.assert_close(got, expected)
    assert [(line["event"], line["tokens"]) for line in lines] == [("prompt_step_dropped", 16)]
    assert record.num_replayed == 1
    talk.step({1: 15})
    assert record.num_replayed == 1


def test_decodes_are_captured_where_prompts_are_not(
    runners: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may suffice for the smaller steps only."""

    def full(_: object) -> int:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(prompt_graphs.PromptGraphs, "record_all", full)
    record = Again()
    capture(runners[1], record, max_rows=1, max_prompt_tokens=SIZES[-1])
    assert runners[1]._prompt_graphs is None
    talk = Conversations(runners, [PLAIN])
    talk.step({0: 16})
    expected, got = talk.step({0: 1})
    assert record.num_replayed == 1
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-4)


def test_rows_of_short_prompts_have_the_logits_of_their_last_tokens(
    runners: list[ModelRunner],
) -> None:
    """A step has as many rows of logits as rows, and those that are wanted are not the first."""
    record = Again()
    capture(runners[1], record, max_rows=8, max_prompt_rows=8)
    expected, got = Conversations(runners, [PLAIN] * 3).step({0: 1, 1: 5, 2: 2})
    assert record.num_replayed == 1
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-4)


def test_tables_that_come_later_are_found(runners: list[ModelRunner]) -> None:
    """All tables move when there is no room for another, and steps are captured anew."""
    record = Again()
    capture(runners[1], record, max_rows=4, max_prompt_tokens=SIZES[-1])
    profiles = [Profile(Linear(factor=2.0 + at)) for at in range(4)]
    talk = Conversations(runners, [PLAIN, *profiles[-1:]])
    talk.step({0: 16})
    before = record.num_recorded
    for each in runners:
        for profile in profiles:
            each.table_id(profile)
    talk.step({1: 16})
    assert record.num_recorded == before + 1
    expected, got = talk.step({0: 15, 1: 1})
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-4)


def test_steps_without_room_are_queued(runners: list[ModelRunner]) -> None:
    """The bounds are tokens, prompts, keys, sequences and rows of logits."""
    runner = runners[1]
    limits = CaptureLimits(4096, 80, SPARE, max_prompt_tokens=400)
    tables = runner._tables

    def never(*_: object) -> Any:
        raise AssertionError("nothing runs")

    graphs = prompt_graphs.PromptGraphs(never, never, tables, never, limits, page_size=16)
    decode = Span([5], 200, range(13), 0, range(1))
    prompt, last = Span([5] * 4, 0, [0], 0, range(3, 4)), range(1, 2)
    behind = Span([5] * 2, 4 * 4096 - 2, range(1024), 0, last)
    for spans, is_taken in (
        ([prompt], True),
        ([prompt] * 4 + [decode] * 76, True),
        ([prompt] * 5, False),
        ([prompt] * 4 + [decode] * 77, False),
        ([decode] * 4, False),
        ([prompt._replace(token_ids=[5] * 384)], True),
        ([prompt._replace(token_ids=[5] * 384), decode], False),
        ([prompt._replace(token_ids=[5] * 100, logit_rows=range(81))], False),
        ([behind], True),
        ([behind, behind], False),
    ):
        assert graphs.takes(spans) == is_taken, spans
    tables.id_of(Profile(Unscaled(), None, ReRope(16)))
    assert not graphs.takes([prompt])


def test_no_prompts_are_captured_whose_part_is_queued(llama_checkpoint: Checkpoint) -> None:
    """Position methods, and the lists of exact batches, which have room for single tokens only."""
    exact, config = replace(llama_checkpoint, exact_batches=True), CONFIG
    far = Profile(Unscaled(), None, ReRope(16))
    assert captured_tokens(llama_checkpoint, config, [PLAIN], ModelRunner) > 0
    assert captured_tokens(llama_checkpoint, config, [PLAIN, far], ModelRunner) == 0
    assert captured_tokens(exact, config, [PLAIN], ModelRunner) == 0


@pytest.mark.parametrize("most", [0, 63, 64, 300, 2048, 5000])
def test_less_than_an_eighth_is_padding(most: int) -> None:
    """Steps from 64 tokens on find a size, up to 2,048 or the largest."""
    sizes = prompt_sizes(most)
    assert sizes == sorted(set(sizes))
    assert bool(sizes) == (most >= 64)
    for count in range(65, (sizes or [0])[-1] + 1):
        size = next(each for each in sizes if each >= count)
        assert size - count < size / 8
    assert len(sizes) <= 41
    assert most_prompts(MOST_TOKENS) == 16
