"""An engine one step ahead of the host gives every request what a waiting engine gives it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.parallel.group import RanksApartError
from ropewalk.model_runtime.request import FinishReason, Request
from tests.doubles.deferred_runner import Answers, core_of, device_of
from tests.doubles.engines import deployment_of, request
from tests.doubles.random_workloads import YARN, Workload, check, serve, workload


@pytest.mark.parametrize("first_seed", [0, 6])
def test_every_request_has_the_same_answer(llama_checkpoint: Checkpoint, first_seed: int) -> None:
    """Random requests arrive, share pages, grow, are preempted, are aborted, and end."""
    num_followed = 0
    for seed in range(first_seed, first_seed + 6):
        work = workload(llama_checkpoint, seed)
        expected, _ = serve(llama_checkpoint, work, is_ahead=False)
        answers, core = serve(llama_checkpoint, work, is_ahead=True)
        num_followed += device_of(core).num_followed
        check(answers, expected)
    assert num_followed > 40, "the engine was hardly ever ahead"


def plain(checkpoint: Checkpoint, number: int, max_tokens: int = 30, **sampling: Any) -> Request:
    """A request that ends by max_tokens."""
    sampling = {"ignore_eos": True, "temperature": 0.7, "seed": number, **sampling}
    asked = request(deployment_of(checkpoint), [number, 3, 5], max_tokens=max_tokens, **sampling)
    return replace(asked, request_id=f"r{number}")


def decoding(checkpoint: Checkpoint, *requests: Request) -> tuple[EngineCore, Answers]:
    """A core that is ahead, whose requests have a few tokens each."""
    core = core_of(checkpoint, is_ahead=True)
    answers = Answers(core, checkpoint)
    answers.add(*requests)
    while core._in_flight is None:
        core.step()
    return core, answers


def test_a_step_is_launched_before_the_one_before_it_is_read(llama_checkpoint: Checkpoint) -> None:
    """One step is in flight between two calls, and each call delivers one token a request."""
    core, answers = decoding(
        llama_checkpoint, plain(llama_checkpoint, 1), plain(llama_checkpoint, 2)
    )
    device = device_of(core)
    for _ in range(5):
        before = [len(outputs) for outputs in answers.outputs.values()]
        assert len(device.queue) == 1
        assert core.step() == 2
        assert [len(outputs) for outputs in answers.outputs.values()] == [num + 1 for num in before]


def test_no_token_is_computed_beyond_max_tokens(llama_checkpoint: Checkpoint) -> None:
    """The last token of a request is known beforehand, so its row is not in the next step."""
    core = core_of(llama_checkpoint, is_ahead=True)
    device, rows = device_of(core), list[int]()
    device.spoils = lambda spans: rows.append(len(spans))
    answers = Answers(core, llama_checkpoint)
    answers.add(plain(llama_checkpoint, 1, 4), plain(llama_checkpoint, 2, 9))
    answers.finish()
    assert rows == [2] * 4 + [1] * 5


def test_a_sequence_that_ends_keeps_its_pages_until_the_step_has_run(
    llama_checkpoint: Checkpoint,
) -> None:
    """An abort frees nothing that a launched step may still write to."""
    core, answers = decoding(
        llama_checkpoint, plain(llama_checkpoint, 1), plain(llama_checkpoint, 2)
    )
    used = core.scheduler.pool.num_used
    core.abort("r1")
    assert core.scheduler.pool.num_used == used
    core.check_integrity()
    core.step()
    assert core.scheduler.pool.num_used < used
    answers.finish()
    assert answers.outputs["r1"][-1].finish_reason is FinishReason.ABORT
    assert len(answers.results()["r2"].token_ids) == 30


def test_an_engine_whose_requests_are_all_aborted_waits_for_its_step(
    llama_checkpoint: Checkpoint,
) -> None:
    """The core is idle only when nothing is in flight."""
    core, _ = decoding(llama_checkpoint, plain(llama_checkpoint, 1))
    core.abort("r1")
    assert not core.is_idle
    core.step()
    assert core.is_idle
    assert core.scheduler.pool.num_used == 0


def test_draining_discards_the_tokens(llama_checkpoint: Checkpoint) -> None:
    """An engine that stops has ended its requests already."""
    core, answers = decoding(llama_checkpoint, plain(llama_checkpoint, 1))
    core.fail_all("the engine stopped")
    core.drain()
    assert core.is_idle
    assert core.scheduler.pool.num_used == 0
    assert answers.outputs["r1"][-1].finish_reason is FinishReason.ERROR


def test_a_request_that_can_start_does_not_wait_for_another_step(
    llama_checkpoint: Checkpoint,
) -> None:
    """The step in flight is read, and the next one has the new prompt."""
    core, answers = decoding(llama_checkpoint, plain(llama_checkpoint, 1))
    answers.add(plain(llama_checkpoint, 2))
    core.step()
    assert core._in_flight is None
    core.step()
    assert len(answers.outputs["r2"]) == 1
    answers.finish()


@pytest.mark.parametrize(
    ("num_running", "num_prompt"), [(4, 3), (1, 230)], ids=["too many sequences", "too few pages"]
)
def test_a_request_that_cannot_start_does_not_stop_the_launches(
    llama_checkpoint: Checkpoint, num_running: int, num_prompt: int
) -> None:
    """It starts when a running request has ended. The cache has 240 positions."""
    core = core_of(llama_checkpoint, is_ahead=True)
    answers = Answers(core, llama_checkpoint)
    answers.add(*(plain(llama_checkpoint, number, 40) for number in range(num_running)))
    for _ in range(20):
        core.step()
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN)
    late = request(deployment, [5] * num_prompt, max_tokens=3, ignore_eos=True)
    answers.add(late)
    core.step()  # reads the step in flight, without another one
    for _ in range(5):
        core.step()
        assert core.scheduler.waiting
        assert core._in_flight is not None
    answers.finish()
    assert len(answers.results()[late.request_id].token_ids) == 3


def test_a_row_that_is_not_finite_ends_its_request_only(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was launched from the bad token is discarded for that request."""
    alone = serve(llama_checkpoint, Workload({0: [plain(llama_checkpoint, 2)]}), is_ahead=False)[
        0
    ].results()["r2"]
    core, answers = decoding(
        llama_checkpoint, plain(llama_checkpoint, 1), plain(llama_checkpoint, 2)
    )
    runner = device_of(core).runner
    real = runner.prepare

    def broken(spans: Sequence[Span], token_S: torch.Tensor | None = None) -> Any:
        forward = real(spans, token_S)

        def run() -> torch.Tensor:
            logits_RV = forward().clone()
            logits_RV[0] = torch.nan
            return logits_RV

        monkeypatch.setattr(runner, "prepare", real)
        return run

    monkeypatch.setattr(runner, "prepare", broken)
    answers.finish()
    assert answers.outputs["r1"][-1].finish_reason is FinishReason.ERROR
    assert answers.results()["r2"] == alone


@pytest.mark.parametrize("where", ["fails_to_launch", "fails_to_read"])
def test_a_step_that_fails_ends_its_requests_not_the_engine(
    llama_checkpoint: Checkpoint, where: str
) -> None:
    """Nothing stays in flight, and the next request is served."""
    core, answers = decoding(
        llama_checkpoint, plain(llama_checkpoint, 1), plain(llama_checkpoint, 2)
    )
    setattr(device_of(core), where, RuntimeError("a device is broken"))
    core.step()
    for name in ("r1", "r2"):
        assert answers.outputs[name][-1].finish_reason is FinishReason.ERROR
    core.check_integrity()
    answers.add(plain(llama_checkpoint, 3))
    answers.finish()
    assert len(answers.results()["r3"].token_ids) == 30


@pytest.mark.parametrize("where", ["fails_to_launch", "fails_to_read"])
def test_no_page_is_detained_after_a_failed_step(llama_checkpoint: Checkpoint, where: str) -> None:
    """A request that needs the whole cache is served, though no step of it is launched ahead."""
    core, answers = decoding(
        llama_checkpoint, plain(llama_checkpoint, 1), plain(llama_checkpoint, 2)
    )
    core.abort("r2")
    setattr(device_of(core), where, RuntimeError("a device is broken"))
    core.step()
    assert core.scheduler.pool.num_used == 0
    large = request(
        deployment_of(llama_checkpoint), [5] * 230, max_tokens=10, ignore_eos=True, top_p=0.9
    )
    answers.add(large)
    answers.finish()
    assert len(answers.results()[large.request_id].token_ids) == 10


def test_a_launch_without_memory_falls_back_to_a_step_that_waits(
    llama_checkpoint: Checkpoint,
) -> None:
    """No request ends, and no token differs."""
    requests = [plain(llama_checkpoint, 1), plain(llama_checkpoint, 2)]
    expected = serve(llama_checkpoint, Workload({0: requests}), is_ahead=False)[0].results()
    core, answers = decoding(llama_checkpoint, *requests)
    device_of(core).fails_to_launch = torch.OutOfMemoryError("no room")
    core.step()
    assert core._in_flight is None
    answers.finish()
    assert answers.results() == expected


def test_a_launch_without_memory_ends_an_engine_whose_other_ranks_have_begun_it(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = decoding(llama_checkpoint, plain(llama_checkpoint, 1))
    device_of(core).fails_to_launch = torch.OutOfMemoryError("no room")

    def are_apart() -> None:
        raise RanksApartError("rank 0 has left the step")

    monkeypatch.setattr(device_of(core), "check_device", are_apart)
    with pytest.raises(RanksApartError):
        core.step()


@pytest.mark.parametrize(
    "sampling", [{"logprobs": 1}, {"repetition_penalty": 1.5}, {"presence_penalty": 0.5}], ids=str
)
def test_a_request_whose_next_token_needs_the_last_one_is_never_ahead(
    llama_checkpoint: Checkpoint, sampling: dict[str, Any]
) -> None:
    """Its whole step waits, with the other requests in it."""
    core = core_of(llama_checkpoint, is_ahead=True)
    answers = Answers(core, llama_checkpoint)
    answers.add(plain(llama_checkpoint, 1, **sampling), plain(llama_checkpoint, 2, 20))
    while answers.outputs["r1"][-1:] == [] or not core.is_idle:
        core.step()
        if answers.outputs["r1"] and answers.outputs["r1"][-1].finish_reason is None:
            assert core._in_flight is None
    assert device_of(core).num_followed == 0


def test_a_synchronous_device_is_never_ahead(llama_checkpoint: Checkpoint) -> None:
    """On a CPU a step is over when its forward returns, so there is nothing to gain."""
    core = core_of(llama_checkpoint, is_ahead=False)
    answers = Answers(core, llama_checkpoint)
    answers.add(plain(llama_checkpoint, 1))
    while not core.is_idle:
        core.step()
        assert core._in_flight is None
