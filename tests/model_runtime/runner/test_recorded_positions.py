"""Whole forwards under position methods by the GPU's kernels, interpreted, and their recordings."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention import work_list
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import DualChunk, Profile, ReRope, SelfExtend, Shifted, Sinks, Unscaled
from tests.doubles.engines import EngineFactory, answer, deployment_of, request, tiny_checkpoint
from tests.doubles.recorded_runners import CONFIG, Again, Conversations, runner_of
from tests.oracles.triton_attention import use_triton

L, PAGE = 64, 16
METHODS = (ReRope(24), SelfExtend(24, 8), DualChunk(48, 16), Shifted(21, 6), Sinks(4, 40))
NATIVE = Profile(Unscaled())
PLACED = [
    Profile(Unscaled(), L if index == 0 else None, method) for index, method in enumerate(METHODS)
]


@pytest.fixture
def checkpoint() -> Checkpoint:
    """A Llama of one layer."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    return tiny_checkpoint("llama", num_hidden_layers=1, **heads)


def logits(runner: ModelRunner, steps: Sequence[range]) -> list[Tensor]:
    """The logits of every token, by sequence; all sequences take the same steps together."""
    tokens = torch.arange(200).mul(37).remainder(199).tolist()
    found: list[list[Tensor]] = [[] for _ in PLACED]
    for step in steps:
        spans = [
            Span(
                tokens[step.start + index : step.stop + index],
                step.start,
                range(5 * index, 5 * index + 5),
                runner.table_id(profile),
                range(len(step)),
            )
            for index, profile in enumerate(PLACED)
        ]
        rows = runner.run(spans).split(len(step))
        for sequence, own in zip(found, rows, strict=True):
            sequence.append(own.clone())
    return [torch.cat(each) for each in found]


@pytest.mark.long
def test_chunks_and_decodes_equal_a_whole_prompt_on_a_cpu(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method in one batch; decodes cross a page and a chunk of dual chunk attention."""
    expected = logits(build_runner(checkpoint, CONFIG, PLACED), [range(66)])
    use_triton(monkeypatch)
    runner = build_runner(checkpoint, CONFIG, PLACED)
    steps = [range(40), range(40, 62), *(range(at, at + 1) for at in range(62, 66))]
    for reference, got in zip(expected, logits(runner, steps), strict=True):
        torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_replayed_steps_read_by_the_methods_of_their_tables(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list is filled again with other tables, too, and a method that comes later is recorded."""
    use_triton(monkeypatch)
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)
    record, first = Again(), [NATIVE, PLACED[0], PLACED[2]]
    runners = runner_of(checkpoint, None, first, 8), runner_of(checkpoint, record, first, 8)
    talk = Conversations(runners, [PLACED[0], NATIVE, PLACED[2], PLACED[4]])
    num_recorded = record.num_recorded
    talk.step({0: 95, 1: 20, 2: 90})
    for sequences in ((0, 1, 2), (2, 0), (1,)):
        expected, got = talk.step(dict.fromkeys(sequences, 1))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (record.num_recorded, record.num_replayed) == (num_recorded, 3)
    talk.step({3: 70})
    expected, got = talk.step({3: 1, 0: 1})
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert record.num_recorded == num_recorded + 1
    assert recorded_steps(runners[1]) == {True}


def recorded_steps(runner: ModelRunner) -> set[bool]:
    """Whether the lists of recorded steps have the ranges of methods."""
    assert runner._graphs is not None
    every = runner._graphs._recorded.values()
    return {cut.has_methods for each in every for cut in each.batch.work_lists}


def test_sinks_serve_a_context_longer_than_the_cache(
    checkpoint: Checkpoint, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released pages leave holes in the page table, and are written by other sequences."""
    positions = {"method": "sinks", "sinks": 4, "window": 28, "when": "always"}
    block = {"rope_type": "default", "positions": positions}
    deployment = deployment_of(checkpoint, rope_scaling=block, page_size=PAGE, max_model_len=512)
    config = {"kv_cache_tokens": 8 * PAGE, "max_num_batched_tokens": 32}
    ids = [[7 * at % 199 for at in range(num_tokens)] for num_tokens in (136, 40)]
    results = []
    for is_triton in (False, True):
        if is_triton:
            use_triton(monkeypatch)
        asked = [request(deployment, each, max_tokens=6, logprobs=0) for each in ids]
        results.append(answer(engines.over(checkpoint, **config), *asked))
    for expected, got in zip(*results, strict=True):
        assert got.token_ids == expected.token_ids
        values = [[entry.logprob for entry in each.logprobs] for each in (got, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
