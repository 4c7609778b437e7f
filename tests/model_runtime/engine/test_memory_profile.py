"""The memory of a step: the largest step is run in full, and only its figures are kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.memory import memory_profile
from ropewalk.model_runtime.engine.memory.cache_size import MemoryProfile
from ropewalk.model_runtime.engine.memory.memory_profile import (
    GRAPH_BYTES,
    WORKSPACE_BYTES,
    CudaMeter,
    Reading,
    graphs_bytes,
    largest_step,
    profile_memory,
)
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.sampler import SamplingRow, in_one_transfer, rows_at
from ropewalk.rope import Profile
from tests.doubles.engines import EngineFactory, answer, deployment_of, request, tiny_checkpoint
from tests.doubles.runner_spy import spy_on_every_runner
from tests.doubles.tensor_meter import TensorMeter

GIB = 2**30
CONFIG = EngineConfig(
    kv_cache_tokens=0,
    max_model_len=200,
    page_size=16,
    max_num_seqs=5,
    max_num_batched_tokens=150,
    max_num_logit_rows=70,
)


class StillMeter:
    """A device of 10 GiB on which nothing changes."""

    def __init__(self, free: int = 6) -> None:
        self._reading = Reading(10 * GIB, free * GIB, 3 * GIB, 2 * GIB, 2 * GIB)

    def reset(self) -> None:
        """Nothing has to be given back."""

    def read(self) -> Reading:
        """The reading is always the same."""
        return self._reading


def measured(checkpoint: Checkpoint, config: EngineConfig, meter: Any = None) -> MemoryProfile:
    """The profile under the deployment's own tables, the last of which is the longest."""
    return profile_memory(checkpoint, config, profiles(checkpoint), 0.9, meter or StillMeter())


def profiles(checkpoint: Checkpoint) -> Sequence[Profile]:
    """The profiles of a deployment with its defaults."""
    return [tier.profile for tier in deployment_of(checkpoint).own_tiers]


class ScriptedMeter:
    """Readings one after the other, in GiB: total, free, reserved, allocated, peak."""

    def __init__(self, *readings: tuple[int, int, int, int, int]) -> None:
        self._left = [Reading(*(number * GIB for number in each)) for each in readings]
        self.calls: list[str] = []

    def reset(self) -> None:
        """Note the call."""
        self.calls.append("reset")

    def read(self) -> Reading:
        """Note the call, and take the next reading."""
        self.calls.append("read")
        return self._left.pop(0)


@pytest.mark.parametrize(("most_drafted", "rows"), [(0, 5), (7, 40)])
def test_the_cache_gets_what_the_rest_leaves_of_the_share(
    most_drafted: int, rows: int, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache gets the share less weights, a step, memory outside torch, and recorded steps."""
    config = replace(CONFIG, max_draft_tokens=most_drafted)
    steps = sizes_of_runs(monkeypatch)
    monkeypatch.setattr(memory_profile, "captures_graphs", lambda *_: True)
    before, after, begun = (100, 80, 19, 15, 15), (100, 70, 28, 16, 22), (100, 70, 28, 16, 16)
    meter = ScriptedMeter(before, after, begun, (100, 60, 30, 16, 19))
    profile = measured(llama_checkpoint, config, meter)
    graph_bytes = graphs_bytes(3 * GIB, config, llama_checkpoint.vocab_size, 150)
    assert profile == MemoryProfile(100 * GIB, 2 * GIB, 15 * GIB, 7 * GIB, graph_bytes)
    assert profile.cache_bytes(0.5) == 50 * GIB - (2 + 15 + 7) * GIB - graph_bytes
    assert profile.cache_bytes(0.2) < 0
    assert meter.calls == ["reset", "read", "read", "reset", "read", "read", "reset"]
    sampled_at_once = [(rows, rows, rows)] * (most_drafted > 0)
    assert steps == [(150, 5, 74), (150, 5, 5), *sampled_at_once, (64, 64, rows), (128, 64, 64)]


def test_captured_steps_share_all_but_page_tables() -> None:
    """Steps have 1, 2, 4 and 5 rows, and with prompts 8 to 150. 200 positions are 13 pages.

    Prompts that are no rows have 64, 72 and so on up to 144 tokens.
    """
    prompts = 8 + 16 + 32 + 64 + 96 + 128 + 150
    own_bytes = 4 * (5 * 2048 + (12 + prompts) * 13) + 11 * GRAPH_BYTES
    assert graphs_bytes(1000, CONFIG, 2048) == 1000 + own_bytes + WORKSPACE_BYTES
    drafting = replace(CONFIG, max_draft_tokens=7)  # decodes of 8, 16, 24, 32 and 40 rows, not of 5
    own_bytes = 4 * (40 * 2048 + (127 + 64 + 96 + 128 + 150) * 13) + 12 * GRAPH_BYTES
    assert graphs_bytes(1000, drafting, 2048) == 1000 + own_bytes + WORKSPACE_BYTES
    own_bytes = 4 * (5 * 2048 + (12 + 8 + 16 + 32 + 64 + 6) * 13) + (8 + 10) * GRAPH_BYTES
    assert graphs_bytes(1000, CONFIG, 2048, 150) == 1000 + own_bytes + WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("limits", "num_tokens", "num_rows"),
    [
        ((150, 5, 70, 200), [146, 1, 1, 1, 1], [70, 1, 1, 1, 1]),
        ((150, 5, 70, 60), [60, 60, 28, 1, 1], [60, 10, 1, 1, 1]),
        ((150, 2, 70, 60), [60, 60], [60, 10]),  # two contexts have no more tokens
        ((3, 5, 70, 60), [1, 1, 1], [1, 1, 1]),
        ((8, 1, 70, 60), [8], [8]),
    ],
)
def test_the_largest_step_uses_all_that_the_limits_allow(
    limits: tuple[int, int, int, int], num_tokens: list[int], num_rows: list[int]
) -> None:
    """The limits of a step are tokens, sequences, scored positions and the longest context."""
    tokens, seqs, rows, context = limits
    config = EngineConfig(
        kv_cache_tokens=0,
        max_model_len=context,
        page_size=16,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_num_logit_rows=rows,
    )
    spans = largest_step(config, 3, 7)
    assert [len(span.token_ids) for span in spans] == num_tokens
    assert [len(span.logit_rows) for span in spans] == num_rows
    for span in spans:
        assert span.first_position + len(span.token_ids) == context
        assert span.logit_rows[-1] == len(span.token_ids) - 1
        assert len(span.pages) == -(-context // 16)
        assert max(span.token_ids) < 7
        assert span.table_id == 3


def test_no_step_of_an_engine_is_larger(
    llama_checkpoint: Checkpoint, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine scores prompts beside decodes, and its steps reach the bounds."""
    sizes = sizes_of_runs(monkeypatch)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 60, "max_num_logit_rows": 30}
    engine = engines.over(llama_checkpoint, max_model_len=200, **limits)
    deployment = deployment_of(llama_checkpoint)
    ids = [[(7 * at + 3 * number) % 190 + 5 for at in range(100)] for number in range(7)]
    answer(
        engine,
        *(
            request(deployment, each, max_tokens=20, ignore_eos=True, prompt_logprobs=number % 3)
            for number, each in enumerate(ids)
        ),
        *(request(deployment, each[50:] * 3, max_tokens=30, ignore_eos=True) for each in ids),
    )
    spans = largest_step(replace(CONFIG, **limits), 0, 199)
    largest = size_of(spans)
    assert all(got <= most for size in sizes for got, most in zip(size, largest, strict=True))
    # The bounds are reached, so the step that is measured is not far too large.
    assert max(tokens for tokens, _, _ in sizes) == largest[0] == 60
    assert max(rows for _, _, rows in sizes) > 30


def sizes_of_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """A list that each forward from now on adds its size to."""
    sizes: list[tuple[int, int, int]] = []

    def note(spans: Sequence[Span], logits_RV: Tensor) -> None:
        sizes.append(size_of(spans))
        assert len(logits_RV) == sizes[-1][2]

    spy_on_every_runner(monkeypatch, note)
    return sizes


def size_of(spans: Sequence[Span]) -> tuple[int, int, int]:
    """The tokens, the sequences and the rows of logits of a step."""
    num_tokens = sum(len(span.token_ids) for span in spans)
    return num_tokens, len(spans), sum(len(span.logit_rows) for span in spans)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "row_bytes"),
    [
        ({"max_num_logit_rows": 110}, 4),  # float32 logits
        # With a bias, without the greedy row, scaled, a probability in two types, summed.
        ({"max_num_seqs": 105}, 4 + 4 + 4 + 4 + 4 + 8 + 8),
    ],
)
def test_measured_memory_grows_with_the_rows(
    more: dict[str, int], row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored and sampled rows each cost their vocabulary, and no tensor stays afterwards."""
    monkeypatch.setattr(memory_profile, "sample_rows", sample_as_on_a_device)
    checkpoint = tiny_checkpoint("llama", vocab_size=4096)
    taken = []
    for limits in ({"max_num_logit_rows": 10}, {"max_num_logit_rows": 10, **more}):
        with TensorMeter() as meter:
            profile = measured(checkpoint, replace(CONFIG, **limits), meter)
            taken.append(profile.step_bytes)
            assert meter.read().allocated < 100_000
    assert taken[1] - taken[0] >= 100 * checkpoint.vocab_size * row_bytes


@pytest.mark.long
def test_tables_of_later_profiles_are_counted() -> None:
    """The room of 200 tables, two of 13 page starts and 16 offsets, is not the cache's."""
    checkpoint = tiny_checkpoint("llama")
    taken = []
    for num_tables in (1, 200):
        with TensorMeter() as meter:
            config = replace(CONFIG, num_rope_tables=num_tables)
            taken.append(measured(checkpoint, config, meter).step_bytes)
    num_pairs = next(iter(checkpoint.native.tables.values())).rotary.num_pairs
    num_built = len({*profiles(checkpoint)})
    assert taken[1] - taken[0] >= (200 - num_built) * 2 * 4 * (13 + 16) * num_pairs


def sample_as_on_a_device(
    logits_RV: Tensor, places: Sequence[int], rows: Sequence[SamplingRow]
) -> tuple[list[bool], list[int]]:
    """Sample as `sample_rows` does on a device."""
    return in_one_transfer(logits_RV, rows_at(logits_RV, places), rows)


@pytest.mark.parametrize(("free", "context_len"), [(6, 200), (0, 16)])
def test_a_context_is_no_longer_than_a_cache_could_be(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, free: int, context_len: int
) -> None:
    """If the share is full already, then one page is left to measure the step with."""
    lens: list[int] = []

    def note(spans: Sequence[Span], _: Tensor) -> None:
        lens.extend(span.first_position + len(span.token_ids) for span in spans)

    spy_on_every_runner(monkeypatch, note)
    measured(llama_checkpoint, CONFIG, StillMeter(free=free))
    assert set(lens) == {context_len}


def test_a_step_without_memory_is_a_sentence(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a step without memory names the limits to lower."""

    def run(self: ModelRunner, spans: Sequence[Span]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "run", run)
    with pytest.raises(ModelError, match=r"a step of 150 tokens .*lower max_num_batched_tokens"):
        measured(llama_checkpoint, CONFIG)


def test_a_cuda_device_is_read_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the peak is reset, memory that no tensor holds is given back."""
    device = MagicMock()
    device.mem_get_info.return_value = (60, 100)
    device.memory_reserved.return_value = 30
    device.memory_allocated.return_value = 10
    device.max_memory_allocated.return_value = 20
    monkeypatch.setattr(torch, "cuda", device)
    meter = CudaMeter(torch.device("cuda:0"))
    meter.reset()
    called = [name for name, _, _ in device.method_calls]
    assert called == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
    device.reset_mock()
    reading = meter.read()
    assert device.method_calls[0][0] == "synchronize"
    assert reading == Reading(total=100, free=60, reserved=30, allocated=10, peak=20)
    assert reading.outside == 10
