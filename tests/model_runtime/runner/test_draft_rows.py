"""Rows of drafts by the GPU's kernels, interpreted: single tokens that share a page table."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention import work_list
from ropewalk.model_runtime.attention.batch import Span, single_rows
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.cuda_graphs import DecodeGraphs
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Linear, Profile, ReRope, Sinks, Unscaled
from tests.doubles.deferred_runner import Answers, DeferredRunner
from tests.doubles.engines import Result, deployment_of, request
from tests.doubles.recorded_runners import CONFIG, Again, capture, runner_of
from tests.oracles.draft_adversary import Counted, tell, use_adversary
from tests.oracles.triton_attention import interpreted_checkpoint

TOKENS = torch.arange(200).mul(37).remainder(199).tolist()
PROFILES = [
    Profile(Unscaled()),
    Profile(Linear(factor=4.0)),
    Profile(Unscaled(), None, ReRope(24)),
    Profile(Unscaled(), None, Sinks(4, 20)),
]
# Tokens before a step of every sequence, and the tokens of its step: one page ends, one begins.
LENS = ((14, 4), (40, 1), (33, 3), (30, 2))


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint served by the GPU's attention on the CPU; a Llama of one layer by default."""
    return interpreted_checkpoint(request, monkeypatch)


def recorded_runner(
    checkpoint: Checkpoint, record: Again | None, profiles: Sequence[Profile], max_rows: int
) -> ModelRunner:
    """A runner whose recorded steps have up to so many rows."""
    runner = runner_of(checkpoint, None, profiles)
    if record is not None:
        capture(runner, record, max_rows=max_rows)
    return runner


def spans_of(runner: ModelRunner, profiles: Sequence[Profile]) -> list[Span]:
    """A step of several tokens of each sequence, after its first ones were computed."""
    tables = [runner.table_id(each) for each in profiles]
    pages = [list(range(10 * index, 10 * index + 6)) for index in range(len(profiles))]
    before, spans = [], []
    for table, own, (num, count) in zip(tables, pages, LENS, strict=False):
        before.append(Span(TOKENS[:num], 0, own, table, range(num - 1, num)))
        spans.append(Span(TOKENS[num : num + count], num, own, table, range(count)))
    runner.run(before)
    return spans


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpoint", "profiles"),
    [
        (("llama", 1), PROFILES),
        (("llama", 1), PROFILES[:2]),
        (("gemma2", 2), PROFILES[:2]),  # the window of a layer
    ],
    ids=("positions", "tables", "window"),
    indirect=["checkpoint"],
)
def test_rows_of_a_draft_answer_as_its_tokens_one_by_one(
    checkpoint: Checkpoint, profiles: list[Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and queued: rows of several sequences, tables, methods and windows in one step."""
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)  # contexts of several pieces
    found: list[Tensor] = []
    record = Again()
    for each in (None, record):
        runner = recorded_runner(checkpoint, each, profiles, 10)
        rows = single_rows(spans_of(runner, profiles))
        found.append(runner.run(rows).clone())
    queued_RV, recorded_RV = found
    assert record.num_replayed == 1
    runner = recorded_runner(checkpoint, None, profiles, 10)
    spans = spans_of(runner, profiles)
    together_RV = runner.run(spans).clone()
    runner = recorded_runner(checkpoint, None, profiles, 10)
    alone_RV = torch.cat([runner.run([row]) for row in single_rows(spans_of(runner, profiles))])
    for got_RV in (queued_RV, recorded_RV, together_RV):
        torch.testing.assert_close(got_RV, alone_RV, atol=5e-5, rtol=1e-5)
    assert len(alone_RV) == sum(count for _, count in LENS[: len(profiles)])


@pytest.mark.long
@pytest.mark.parametrize(("share_right", "temperature"), [(0.7, 0.9), (1.0, 0.0)])
def test_an_engine_of_recorded_steps_answers_as_without_drafts(
    checkpoint: Checkpoint,
    share_right: float,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences share recorded steps of six rows, and go on ahead of the host."""
    profile = Profile(Unscaled())
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "default"}, page_size=16)
    asked = [
        request(deployment, TOKENS[:num], max_tokens=10, temperature=temperature, seed=num, **cut)
        for num, cut in ((13, {}), (30, {"top_p": 0.8}))
    ]
    adversary = use_adversary(monkeypatch)
    takes = DecodeGraphs.takes
    taken: list[bool] = []

    def noted(graphs: DecodeGraphs, spans: Sequence[Span]) -> bool:
        taken.append(takes(graphs, spans))
        return taken[-1]

    monkeypatch.setattr(DecodeGraphs, "takes", noted)
    results: list[list[Result]] = []
    for most in (0, 4):
        taken.clear()
        record, counted = Again(), Counted()
        config = EngineConfig(
            kv_cache_tokens=CONFIG.kv_cache_tokens,
            max_model_len=CONFIG.max_model_len,
            page_size=CONFIG.page_size,
            max_num_seqs=2,
            max_draft_tokens=most,
        )
        device = DeferredRunner(recorded_runner(checkpoint, record, [profile], 6))
        device.most_draft_rows = 6
        core = EngineCore(device, config, counted)
        answers = Answers(core, checkpoint)
        answers.add(*asked)
        answers.finish()
        by_id = answers.results()
        results.append([by_id[each.request_id] for each in asked])
        assert taken.count(False) == 1, "a step without the prompts was not recorded"
        if not most:
            tell(adversary, 1, share_right, list(zip(asked, results[0], strict=True)))
            num_steps = record.num_replayed
        else:
            assert counted.num_drafted > 5
            assert counted.num_accepted > 3
            assert record.num_replayed < num_steps
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("num_seqs", "most", "num_tokens", "num_rows"),
    [
        *((32, 0, 2048, 32), (1, 0, 2048, 1), (1, 15, 2048, 16), (4, 7, 2048, 32)),
        *((32, 15, 2048, 64), (100, 15, 2048, 100), (2, 15, 20, 20)),
    ],
)
def test_recorded_rows_hold_the_drafts_of_few_sequences(
    num_seqs: int, most: int, num_tokens: int, num_rows: int
) -> None:
    """Up to 64 rows, within the tokens of a step; without drafts one for each sequence."""
    config = EngineConfig(
        kv_cache_tokens=4096,
        max_model_len=256,
        max_num_seqs=num_seqs,
        max_draft_tokens=most,
        max_num_batched_tokens=num_tokens,
    )
    assert config.max_decode_rows == num_rows
