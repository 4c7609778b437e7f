"""Decode steps replayed from CUDA graphs answer like steps that are not recorded.

Without a GPU a recording is the forward called again: it then reads the fixed places, and knows as
little of the step's numbers as a CUDA graph does. Kernels are interpreted.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention import work_list
from ropewalk.model_runtime.attention.batch import Batch, Span
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.attention.work_list import WorkList
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner import cuda_graphs
from ropewalk.model_runtime.runner.cuda_graphs import (
    MOST_RECORDED,
    CaptureLimits,
    DecodeGraphs,
    recorded_sizes,
)
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile
from tests.doubles.engines import deployment_of
from tests.doubles.recorded_runners import CONFIG, SPARE, Again, Conversations, capture, runner_of
from tests.oracles.triton_attention import interpreted_checkpoint

TABLES = 20  # places for rotation tables


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint served by the GPU's attention on the CPU; a Llama of one layer by default."""
    return interpreted_checkpoint(request, monkeypatch)


def profiles_of(deployment: Deployment) -> list[Profile]:
    """The profile of each tier."""
    return [tier.profile for tier in deployment.own_tiers]


@pytest.mark.parametrize(
    "checkpoint",
    [("llama", 1), pytest.param(("gemma2", 2), marks=pytest.mark.long)],
    ids=("whole", "windows"),
    indirect=True,
)
def test_replayed_steps_answer_as_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to four sequences differ in length, table and pages; some steps are padded.

    Contexts are cut into pieces of one tile, and a layer with a window has a list of its own.
    """
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)
    record = Again()
    tiers = profiles_of(deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4}))
    plain, recorded = runner_of(checkpoint, None, tiers), runner_of(checkpoint, record, tiers)
    talk = Conversations((plain, recorded), [tiers[0], tiers[-1], tiers[0], tiers[-1]])
    assert record.num_recorded == len(recorded_sizes(CONFIG.max_num_seqs)) == 4
    talk.step({0: 15, 1: 70, 2: 3, 3: 40})
    assert record.num_replayed == 0
    steps = [{0: 1, 1: 1, 2: 1}, {1: 1}, {2: 1, 0: 1, 3: 1, 1: 1}, {3: 1, 2: 1}, {0: 1, 1: 1, 2: 1}]
    for step in steps:
        expected, got = talk.step(step)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert record.num_replayed == len(steps)
    assert recorded._graphs is not None
    for each in recorded._graphs._recorded.values():
        windows = {cut.window for cut in each.batch.work_lists}
        assert windows == ({None} if len(checkpoint.plans) == 1 else {None, 24})
    lists = recorded._graphs._recorded[4].batch.work_lists
    (whole,) = (work for cut, work in lists.items() if cut.window is None)
    assert whole.pieces_S2[:, 1].tolist() == [1, 2, 1, 1], "the last sequence is padding"
    for layer_idx in checkpoint.plans:
        for one, other in zip(
            pages_of(plain).pages(layer_idx), pages_of(recorded).pages(layer_idx), strict=True
        ):
            assert torch.equal(one[:SPARE], other[:SPARE]), "padding touched a sequence's page"


@pytest.mark.parametrize(
    "checkpoint",
    [("llama", 1), pytest.param(("gemma2", 2), marks=pytest.mark.long)],
    ids=("whole", "windows"),
    indirect=True,
)
def test_short_prompts_are_rows_of_replayed_steps(checkpoint: Checkpoint) -> None:
    """Prompts, chunks behind a context, chunks without logits and scored tokens, beside decodes."""
    record = Again()
    tiers = profiles_of(deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4}))
    plain = runner_of(checkpoint, None, tiers)
    recorded = runner_of(checkpoint, record, tiers, max_prompt_rows=8)
    assert record.num_recorded == len(recorded_sizes(CONFIG.max_num_seqs, 8)) == 5
    talk = Conversations((plain, recorded), [tiers[0], tiers[-1], tiers[0], tiers[-1]])
    talk.step({0: 17})
    assert record.num_replayed == 0, "the prompt is longer than a recorded step"
    steps = [
        ({0: 1, 1: 5, 2: 1}, {}),
        ({1: 4, 0: 1, 3: 3}, {1: 3, 3: 0}),
        ({3: 2}, {3: 0}),
        ({3: 1, 2: 1}, {}),
        ({0: 8}, {0: 6}),
        ({0: 1, 1: 1, 2: 1}, {}),
    ]
    for step, num_logits in steps:
        expected, got = talk.step(step, num_logits)
        assert len(got) == sum(num_logits.get(index, 1) for index in step)
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-5)
        for work in lists_of(recorded, sum(step.values())):
            assert int(work.entries_EF[:, 4].max()) == max(step.values()), "read together"
    assert record.num_replayed == len(steps)
    for layer_idx in checkpoint.plans:
        for one, other in zip(
            pages_of(plain).pages(layer_idx), pages_of(recorded).pages(layer_idx), strict=True
        ):
            torch.testing.assert_close(one[:SPARE], other[:SPARE], atol=3e-5, rtol=1e-5)


def test_larger_prompts_and_other_steps_are_not_replayed(llama_checkpoint: Checkpoint) -> None:
    """The bounds are tokens, rows of logits, sequences, and keys that the rows of prompts see.

    Sixteen tokens of a prompt are rows behind any context.
    """
    tables = RopeTables(llama_checkpoint.native, 16, 256, torch.device("cpu"))

    def never(*_: object) -> Any:
        raise AssertionError("nothing runs")

    limits = CaptureLimits(256, 6, 9)
    of_decodes = DecodeGraphs(never, tables, never, limits, page_size=16)
    more = replace(limits, max_prompt_rows=64)
    of_prompts = DecodeGraphs(never, tables, never, more, page_size=16)
    four, last = Span([5] * 4, 0, [0], 0, range(3, 4)), range(4, 5)
    behind = Span([5] * 32, 4079, range(1, 300), 0, last)
    assert sum(range(4080, 4080 + 32)) <= 131_072 < sum(range(4081, 4081 + 32))
    decode = Span([5], 200, range(20, 33), 0, range(1))
    for spans, is_taken in (
        ([four, behind, decode], True),
        ([four._replace(logit_rows=range(4)), behind, decode], True),  # as many as sequences
        ([four._replace(logit_rows=range(4)), behind._replace(logit_rows=range(2, 5))], False),
        ([four, behind._replace(first_position=4080), decode], False),
        ([behind._replace(token_ids=[5] * 16, first_position=100_000), decode], True),
        ([four._replace(token_ids=[5] * 64), decode], False),
        ([decode._replace(logit_rows=range(0)), decode], True),  # a chunk of one token
    ):
        assert of_prompts.takes(spans) == is_taken, spans
        assert not of_decodes.takes(spans)
    assert of_decodes.takes([decode] * 6)
    assert not of_decodes.takes([decode] * 7)


def lists_of(runner: ModelRunner, num_rows: int) -> list[WorkList]:
    """The work lists of the recorded step for so many rows."""
    assert runner._graphs is not None
    size = min(each for each in runner._graphs._recorded if each >= num_rows)
    return [*runner._graphs._recorded[size].batch.work_lists.values()]


def pages_of(runner: ModelRunner) -> KVCache:
    """A runner's cache."""
    return runner._store


def test_rows_that_were_not_sent_are_sent_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that runs out of memory between the page table's two copies is retried."""
    (profile, *_) = profiles_of(deployment_of(checkpoint))
    plain, recorded = (runner_of(checkpoint, None, [profile]) for _ in range(2))
    capture(recorded, Again(), max_rows=1)
    pages = np.array([3], dtype=np.int32)
    one = Span([5], 0, pages, 0, range(1))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "fill", full)
        with pytest.raises(torch.OutOfMemoryError):
            recorded.run([one])
    expected, got = plain.run([one]), recorded.run([one])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert pages_of(recorded).pages(0)[0][3].any(), "the key is on another page"


def test_a_table_made_later_is_found(checkpoint: Checkpoint) -> None:
    """All tables move when one is added, so old recordings would read the old tables."""
    record = Again()
    tiers = profiles_of(deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4}))
    runners = runner_of(checkpoint, None, ()), runner_of(checkpoint, record, ())
    assert record.num_recorded == 0, "there was nothing to read"
    talk = Conversations(runners, [tiers[0], tiers[-1]])
    talk.step({0: 20})
    expected, got = talk.step({0: 1})
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    before = record.num_recorded
    talk.step({1: 30})
    expected, got = talk.step({1: 1, 0: 1})
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert record.num_recorded == before + 1


@pytest.mark.long
def test_profiles_within_the_room_are_not_recorded_again(checkpoint: Checkpoint) -> None:
    """Tables that requests bring after the start are read by steps recorded before."""
    record = Again()
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4})
    tiers = profiles_of(deployment)
    every = dict.fromkeys(
        tier.profile for own in deployment.tiers.values() for tier in own.ascending
    )
    runners = runner_of(checkpoint, None, tiers), runner_of(checkpoint, record, tiers, TABLES)
    num_recorded = record.num_recorded
    talk = Conversations(runners, [each for each in every if each not in tiers][:4])
    assert len(talk.profiles) == 4
    talk.step(dict.fromkeys(range(4), 30))
    for sequences in (range(4), range(2), [3]):
        expected, got = talk.step(dict.fromkeys(sequences, 1))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert record.num_recorded == num_recorded == len(recorded_sizes(CONFIG.max_num_seqs))
    assert record.num_replayed == 3


def test_tensors_that_kernels_read_are_kept(checkpoint: Checkpoint) -> None:
    """A CUDA graph knows only addresses, so every tensor of its batch must live as long."""
    tables = RopeTables(checkpoint.native, 16, 256, torch.device("cpu"))
    tables.id_of(profiles_of(deployment_of(checkpoint))[0])
    kept: list[weakref.ref[Tensor]] = []

    def forward(batch: Batch) -> Tensor:
        tensors = [getattr(batch, each.name) for each in fields(batch)]
        kept.extend(weakref.ref(each) for each in tensors if isinstance(each, Tensor))
        return torch.empty(len(batch.logit_rows_R), 7)

    def record(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        return work(), lambda: None

    graphs = DecodeGraphs(forward, tables, record, CaptureLimits(256, 2, 9), page_size=16)
    assert graphs.record_all() == 2
    gc.collect()
    assert len(kept) > 2 * 8
    assert all(tensor() is not None for tensor in kept)


@pytest.mark.parametrize("are_tables_known", [False, True])
def test_a_step_that_cannot_be_recorded_is_queued(
    checkpoint: Checkpoint, *, are_tables_known: bool
) -> None:
    """Recording fails at start or at the first step with a table; the step still runs."""

    def never(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    (profile, *_) = profiles_of(deployment_of(checkpoint))
    runner = build_runner(checkpoint, CONFIG, [profile] if are_tables_known else [])
    capture(runner, never)
    one = Span([1], 0, [0], runner.table_id(profile), range(1))
    for _ in range(2):
        assert runner.run([one]).isfinite().all()
    assert runner._graphs is None


def test_one_of_several_ranks_does_not_serve_on_after_a_capture_without_memory(
    checkpoint: Checkpoint,
) -> None:
    """Another rank may wait in a gather that this one has left."""

    def full(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        raise torch.OutOfMemoryError("no room")

    profiles = profiles_of(deployment_of(checkpoint))
    alone = build_runner(checkpoint, CONFIG, profiles)
    capture(alone, full)
    assert alone._graphs is None
    one = build_runner(checkpoint, CONFIG, profiles, partial(ModelRunner, is_one_of_ranks=True))
    with pytest.raises(ModelError, match="enforce_eager"):
        capture(one, full)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), torch.OutOfMemoryError()])
def test_only_a_failed_capture_disables_graphs(checkpoint: Checkpoint, error: RuntimeError) -> None:
    """An error of a step's own numbers, or a shortage in a capture, rises, and the next replays."""
    record = Again()
    (profile, *_) = profiles_of(deployment_of(checkpoint))
    runner = runner_of(checkpoint, None, [profile])
    capture(runner, record, max_rows=1)
    one = Span([1], 0, [0], runner.table_id(profile), range(1))
    assert runner._graphs is not None
    with pytest.MonkeyPatch.context() as patch:
        failing = "_numbers"
        if isinstance(error, torch.OutOfMemoryError):
            runner._graphs._recorded.clear()
            failing = "_record"

        def fail(*_: object) -> None:
            raise error

        patch.setattr(runner._graphs, failing, fail)
        with pytest.raises(type(error)):
            runner.run([one])
    assert runner.run([one]).isfinite().all()
    assert record.num_replayed == 1


@pytest.mark.parametrize("most", [1, 2, 6, 8, 32, 64, 200, 1000])
@pytest.mark.parametrize("most_of_prompts", [0, 16, 100, 2048])
def test_padding_is_bounded(most: int, most_of_prompts: int) -> None:
    """Every number of rows finds a size that is less than twice as large, or has at most 8 rows."""
    sizes = recorded_sizes(most, most_of_prompts)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max(most, most_of_prompts), MOST_RECORDED)
    assert min(most, MOST_RECORDED) in sizes, "decodes beside a prompt are padded to more"
    for count in range(1, sizes[-1] + 1):
        size = next(each for each in sizes if each >= count)
        assert size == count or size < 2 * count or (count > most and size <= 8)
