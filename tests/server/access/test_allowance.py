"""The bounds of a key at work, under a clock that the test turns."""

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
from ropewalk.server.access.refusals import KeyLimitError
from ropewalk.server.metrics import MetricFactory


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
    def num_running(self) -> float:
        """Answers that run, as the gauge has them."""
        return self.counters.running._value.get()


def test_more_answers_than_may_run_are_refused_until_one_ends() -> None:
    """The refused request holds nothing."""
    made = Case(max_running=3)
    made.allowance.enter(2)
    told = r"^The API key 'alice' may have 3 answers at a time \(max_running\); 2 of them run\.$"
    with pytest.raises(KeyLimitError, match=told) as raised:
        made.allowance.enter(2)
    assert raised.value.details == {"limit": "max_running", "limit_value": 3}
    assert raised.value.retry_after_s == 1
    made.allowance.enter(1)
    made.allowance.leave(2)
    made.allowance.enter(2)
    assert made.num_running == 3
    assert (made.count(Outcome.ACCEPTED), made.count(Outcome.MAX_RUNNING)) == (3, 1)


def test_more_answers_than_may_ever_run_are_a_mistake() -> None:
    """To send it again later would not help, so the status is not 429."""
    made = Case(max_running=2)
    with pytest.raises(RequestError, match=r"wants 3 answers .* have 2 at once") as raised:
        made.allowance.enter(3)
    assert (raised.value.param, raised.value.code) == ("n", "too_many_answers")
    assert made.num_running == 0


def test_requests_of_a_minute_come_back_evenly() -> None:
    """Retry-After is exact, and no more than those of a minute are there at once."""
    made = Case(max_requests_per_minute=6)
    for _ in range(6):
        made.allowance.enter(4)
    made.now = 4
    with pytest.raises(KeyLimitError, match=r"6 requests of a minute .* again in 6 s") as raised:
        made.allowance.enter(1)
    assert raised.value.details == {"limit": "max_requests_per_minute", "limit_value": 6}
    assert raised.value.retry_after_s == 6
    made.now = 10
    made.allowance.enter(1)
    made.now = 1000
    for _ in range(6):
        made.allowance.enter(1)
    with pytest.raises(KeyLimitError):
        made.allowance.enter(1)
    assert made.count(Outcome.MAX_REQUESTS_PER_MINUTE) == 2


def test_other_bounds_hold_from_now_on() -> None:
    """A smaller bound ends nothing that runs, and a minute's use goes on."""
    made = Case(max_running=1)
    made.allowance.enter(1)
    made.allowance.rebound(KeyBounds(max_running=2, max_requests_per_minute=1))
    made.allowance.enter(1)
    made.allowance.rebound(KeyBounds(max_running=1))
    assert made.num_running == 2
    with pytest.raises(KeyLimitError):
        made.allowance.enter(1)
    made.allowance.rebound(KeyBounds())
    made.allowance.enter(7)
    assert made.num_running == 9


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

    case.allowance.enter(1)
    opened = OpenRequest(closed.append, BrokenSpans(), case.allowance)
    opened.submitted(1, 3)
    ended = EndedAnswer(
        tier, FinishReason.STOP, 3, 2, 0, 0.1, 0.2, is_beyond=False, seconds=0.3, ended_at=1.0
    )
    opened.answer_ended(ended)
    opened.answered(200, 0.3)
    assert case.num_running == 0
    assert closed == [opened]
    tokens = case.counters.prompt_tokens, case.counters.generated_tokens
    assert [each._value.get() for each in tokens] == [3, 2]
