"""The bounds of a key at work, under a clock that the test turns."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.request import FinishReason
from ropewalk.rope import native_rope
from ropewalk.server.access.allowance import Allowance, KeyMetrics, Outcome
from ropewalk.server.access.keys import KeyBounds
from ropewalk.server.access.open_request import EndedAnswer, OpenRequest
from ropewalk.server.access.refusals import ClientDisconnectedError, KeyLimitError
from ropewalk.server.metrics import MetricFactory


async def stays() -> None:
    """A client that never leaves."""
    await asyncio.Event().wait()


class Case:
    """An allowance with its clock and its counters."""

    def __init__(self, **bounds: int) -> None:
        self.now = 0.0
        self.counters = KeyMetrics(MetricFactory()).of("alice")
        self.allowance = Allowance("alice", KeyBounds(**bounds), self.counters, lambda: self.now)

    def count(self, outcome: Outcome) -> float:
        """The requests with this outcome."""
        return float(self.counters.requests[outcome]._value.get())

    @property
    def held(self) -> tuple[float, float]:
        """Answers that run and answers that wait, as the gauges have them."""
        return self.counters.running._value.get(), self.counters.waiting._value.get()

    async def entering(self, num: int = 1) -> asyncio.Task[None]:
        """A task that enters; it runs until it waits."""
        task = asyncio.ensure_future(self.allowance.enter(num, stays))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


def run(case: Coroutine[Any, Any, None]) -> None:
    """Run a case to its end."""
    asyncio.run(asyncio.wait_for(case, 20))


def test_answers_wait_in_order_and_start_when_one_ends() -> None:
    """A small request does not pass a large one that came before it."""

    async def case() -> None:
        made = Case(max_running=3)
        first = await made.entering(2)
        large, small = await made.entering(3), await made.entering(1)
        assert (first.done(), large.done(), small.done()) == (True, False, False)
        assert made.held == (2, 4)
        made.allowance.leave(2)
        await large
        assert not small.done()
        made.allowance.leave(3)
        await small
        made.allowance.leave(1)
        assert made.held == (0, 0)
        assert made.count(Outcome.ACCEPTED) == 3

    run(case())


def test_a_full_queue_refuses_and_names_its_bound() -> None:
    """The refused request holds nothing."""

    async def case() -> None:
        made = Case(max_running=1, max_queued=1)
        await made.entering()
        waiting = await made.entering()
        with pytest.raises(
            KeyLimitError,
            match=r"^1 answer of the API key 'alice' waits; at most 1 may \(max_queued\)",
        ) as e:
            await made.allowance.enter(1, stays)
        assert e.value.details == {"limit": "max_queued", "limit_value": 1}
        assert e.value.retry_after_s == 1
        made.allowance.leave(1)
        await waiting
        assert made.held == (1, 0)
        assert made.count(Outcome.MAX_QUEUED) == 1

    run(case())


@pytest.mark.parametrize(("most", "answers"), [(1, "1 answer"), (3, "3 answers")])
def test_a_key_without_a_queue_is_told_how_many_answers_it_may_have(
    most: int, answers: str
) -> None:
    """Nothing waits then, so a count of waiting answers says nothing."""

    async def case() -> None:
        made = Case(max_running=most, max_queued=0)
        await made.entering(most)
        told = rf"^The API key 'alice' may have {answers} at a time \(max_running\), and none may "
        with pytest.raises(KeyLimitError, match=told):
            await made.allowance.enter(1, stays)

    run(case())


def test_more_answers_than_may_ever_run_are_a_mistake() -> None:
    """Waiting would not help, so the status is not 429."""

    async def case() -> None:
        made = Case(max_running=2)
        with pytest.raises(RequestError, match=r"asks for 3 answers .* have 2 at once") as raised:
            await made.allowance.enter(3, stays)
        assert (raised.value.param, raised.value.code) == ("n", "too_many_answers")
        assert made.held == (0, 0)

    run(case())


def test_a_client_that_leaves_frees_its_place() -> None:
    """Those behind it move up; a cancelled request is no different."""

    async def case() -> None:
        made = Case(max_running=1)
        await made.entering()
        left = asyncio.Event()

        async def leaves() -> None:
            await left.wait()

        leaving = asyncio.ensure_future(made.allowance.enter(1, leaves))
        await asyncio.sleep(0)
        cancelled, last = await made.entering(), await made.entering()
        left.set()
        with pytest.raises(ClientDisconnectedError):
            await leaving
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        made.allowance.leave(1)
        await last
        assert made.held == (1, 0)
        assert made.count(Outcome.LEFT) == made.count(Outcome.TIMEOUT) == 1

    run(case())


def test_tokens_of_a_minute_come_back_evenly() -> None:
    """Use beyond the bound delays the next request, and Retry-After is exact."""

    async def case() -> None:
        made = Case(max_tokens_per_minute=600)
        await made.allowance.enter(1, stays)
        made.allowance.charge(500, 0)
        made.allowance.charge(0, 300)
        with pytest.raises(KeyLimitError, match="600 tokens of a minute") as raised:
            await made.allowance.enter(1, stays)
        assert raised.value.retry_after_s == 20  # 200 too many, at 10 a second
        made.now = 19.9
        with pytest.raises(KeyLimitError):
            await made.allowance.enter(1, stays)
        made.now = 20.1
        await made.allowance.enter(1, stays)
        made.now = 1000
        made.allowance.charge(600, 0)
        with pytest.raises(KeyLimitError):
            await made.allowance.enter(1, stays)
        assert made.count(Outcome.MAX_TOKENS_PER_MINUTE) == 3
        assert made.counters.prompt_tokens._value.get() == 1100
        assert made.counters.generated_tokens._value.get() == 300

    run(case())


def test_other_bounds_hold_from_now_on() -> None:
    """A larger bound lets waiting answers in; a smaller one ends nothing that runs."""

    async def case() -> None:
        made = Case(max_running=1)
        await made.entering()
        waiting = await made.entering()
        made.allowance.rebound(KeyBounds(max_running=2, max_tokens_per_minute=60))
        await waiting
        made.allowance.rebound(KeyBounds(max_running=1, max_queued=0))
        assert made.held == (2, 0)
        with pytest.raises(KeyLimitError):
            await made.allowance.enter(1, stays)
        made.allowance.rebound(KeyBounds())
        await made.allowance.enter(7, stays)
        assert made.held == (9, 0)

    run(case())


class BrokenSpans:
    """Spans that fail."""

    trace_id = "0"

    def answer_ended(self, _ended: EndedAnswer) -> None:
        """Fail."""
        raise RuntimeError("a full disk")

    def request_ended(self, *_: Any) -> None:
        """Fail."""
        raise RuntimeError("a full disk")


def test_a_trace_that_fails_gives_the_place_back() -> None:
    """A failure of the traces would otherwise hold a key's bound for good."""
    case, closed = Case(max_running=1), list[OpenRequest]()
    native = native_rope({"max_position_embeddings": 64, "head_dim": 8})
    tier = make_deployment("m", native).choose(RopeRequest(), 3, 2).tier

    async def serve() -> None:
        await (await case.entering())
        opened = OpenRequest(stays, closed.append, BrokenSpans(), case.allowance)
        opened.submitted(1, 3)
        ended = EndedAnswer(
            tier, FinishReason.STOP, 3, 2, 0, 0.1, 0.2, is_beyond=False, seconds=0.3, ended_at=1.0
        )
        opened.answer_ended(ended)
        opened.answered(200, 0.3)
        assert case.held == (0, 0)
        assert closed == [opened]

    run(serve())
