"""The bounds of one key at work: answers that run, answers that wait, tokens of a minute.

Everything here runs on the event loop. Waiting requests are served in the order of arrival, and
they are outside of the engine's queue, so those of other keys pass them.
"""

import asyncio
import enum
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.access.keys import KeyBounds
from ropewalk.server.access.refusals import ClientDisconnectedError, KeyLimitError
from ropewalk.server.metrics import MetricFactory


class Outcome(enum.StrEnum):
    """The outcome of a request at its key's bounds; the last three name the bound."""

    ACCEPTED = "accepted"
    LEFT = "left"  # the client closed the connection while it waited
    TIMEOUT = "timeout"  # its time was over while it waited, or that of the server
    MAX_RUNNING = "max_running"
    MAX_QUEUED = "max_queued"
    MAX_TOKENS_PER_MINUTE = "max_tokens_per_minute"


@dataclass(frozen=True, slots=True)
class KeyCounters:
    """The series of one name."""

    requests: dict[Outcome, Counter]
    prompt_tokens: Counter
    generated_tokens: Counter
    running: Gauge
    waiting: Gauge

    def asked(self, outcome: Outcome) -> None:
        self.requests[outcome].inc()

    def used(self, num_prompt_tokens: int, num_generated: int) -> None:
        self.prompt_tokens.inc(num_prompt_tokens)
        self.generated_tokens.inc(num_generated)


class KeyMetrics:
    """The families of all names. They exist if keys are configured."""

    def __init__(self, factory: MetricFactory) -> None:
        self._requests = factory.counter(
            "ropewalk_key_requests",
            "Generating requests by API key, and what became of them at its bounds.",
            ["key", "outcome"],
        )
        self._tokens = factory.counter(
            "ropewalk_key_tokens", "Tokens by API key: of prompts, and generated.", ["key", "kind"]
        )
        self._running = factory.gauge(
            "ropewalk_key_requests_running", "Answers of an API key in the engine.", ["key"]
        )
        self._waiting = factory.gauge(
            "ropewalk_key_requests_waiting", "Answers that wait for their key's bounds.", ["key"]
        )

    def of(self, name: str) -> KeyCounters:
        """Return the series of a name, at zero if they are new."""
        return KeyCounters(
            {outcome: self._requests.labels(name, outcome.value) for outcome in Outcome},
            self._tokens.labels(name, "prompt"),
            self._tokens.labels(name, "generated"),
            self._running.labels(name),
            self._waiting.labels(name),
        )

    def forget(self, name: str) -> None:
        """Remove the series of a name that is no longer configured."""
        for outcome in Outcome:
            self._requests.remove(name, outcome.value)
        for kind in ("prompt", "generated"):
            self._tokens.remove(name, kind)
        self._running.remove(name)
        self._waiting.remove(name)


_MINUTE_S = 60.0
_RETRY_S = 1  # at the least: when a waiting answer will start is not known


@dataclass(slots=True)
class _Place:
    """A request that waits."""

    num: int  # answers
    entered: asyncio.Future[None]


class Allowance:
    """The use that the requests of one name make of their bounds."""

    def __init__(
        self,
        name: str,
        bounds: KeyBounds,
        counters: KeyCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._bounds = bounds
        self._counters = counters
        self._clock = clock
        self._num_running = 0
        self._waiting: deque[_Place] = deque()
        self._tokens_left = float(bounds.max_tokens_per_minute or 0)
        self._filled_at = clock()

    def rebound(self, bounds: KeyBounds) -> None:
        """Apply other bounds from now on. Answers that run are left alone."""
        self._refill()
        most, before = bounds.max_tokens_per_minute, self._bounds.max_tokens_per_minute
        if most is not None:
            self._tokens_left = float(most) if before is None else min(self._tokens_left, most)
        self._bounds = bounds
        self._admit()

    async def enter(self, num: int, client_left: Callable[[], Awaitable[None]]) -> None:
        """Take the places of `num` answers, which `leave` gives back; wait for them if need be.

        `client_left` returns when the client has closed the connection.
        Raises KeyLimitError, RequestError or ClientDisconnectedError.
        """
        self._check_size(num)
        self._check_tokens()
        if self._waiting or not self._has_room(num):
            self._check_queue(num)
            await self._wait(num, client_left)
            try:
                self._check_tokens()
            except KeyLimitError:
                self.leave(num)
                raise
        else:
            self._set_running(self._num_running + num)
        self._counters.asked(Outcome.ACCEPTED)

    def leave(self, num: int) -> None:
        """Give back the places of `num` answers."""
        self._set_running(self._num_running - num)
        self._admit()

    def charge(self, num_prompt_tokens: int, num_generated: int) -> None:
        """Count tokens. An excess over the bound delays the requests that come next."""
        self._counters.used(num_prompt_tokens, num_generated)
        self._refill()
        self._tokens_left -= num_prompt_tokens + num_generated

    @property
    def _num_waiting(self) -> int:
        return sum(place.num for place in self._waiting)

    def _has_room(self, num: int) -> bool:
        most = self._bounds.max_running
        return most is None or self._num_running + num <= most

    def _admit(self) -> None:
        """Let in those at the head of the queue that have room now."""
        while self._waiting and self._has_room(self._waiting[0].num):
            place = self._waiting.popleft()
            self._set_running(self._num_running + place.num)
            place.entered.set_result(None)
        self._counters.waiting.set(self._num_waiting)

    async def _wait(self, num: int, client_left: Callable[[], Awaitable[None]]) -> None:
        place = _Place(num, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._counters.waiting.set(self._num_waiting)
        leaving = asyncio.ensure_future(client_left())
        try:
            await asyncio.wait({place.entered, leaving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._counters.asked(Outcome.TIMEOUT)
            self._give_up(place)
            raise
        finally:
            leaving.cancel()
        if not place.entered.done():
            self._counters.asked(Outcome.LEFT)
            self._give_up(place)
            raise ClientDisconnectedError

    def _give_up(self, place: _Place) -> None:
        if place.entered.done():
            self.leave(place.num)
        else:
            self._waiting.remove(place)
            self._admit()

    def _set_running(self, num: int) -> None:
        self._num_running = num
        self._counters.running.set(num)

    def _check_size(self, num: int) -> None:
        """Refuse a request that could never start. Raises RequestError."""
        most = self._bounds.max_running
        if most is not None and num > most:
            self._counters.asked(Outcome.MAX_RUNNING)
            raise RequestError(
                f"The request asks for {num} answers (prompts x n); the API key {self.name!r} may "
                f"have {most} at once (max_running).",
                param="n",
                code="too_many_answers",
            )

    def _check_queue(self, num: int) -> None:
        """Refuse a request that has no place to wait. Raises KeyLimitError."""
        most = self._bounds.max_queued
        if most is not None and self._num_waiting + num > most:
            self._counters.asked(Outcome.MAX_QUEUED)
            of_key = f"of the API key {self.name!r}"
            verb = "waits" if self._num_waiting == 1 else "wait"
            told = f"{_answers(self._num_waiting)} {of_key} {verb}; at most {most} may"
            if not most:
                running = f"may have {_answers(self._bounds.max_running or 0)} at a time"
                told = f"The API key {self.name!r} {running} (max_running), and none may wait"
            raise KeyLimitError(
                f"{told} (max_queued).",
                Outcome.MAX_QUEUED,
                most,
                _RETRY_S,
            )

    def _check_tokens(self) -> None:
        """Refuse a request while the minute's tokens are used up. Raises KeyLimitError."""
        most = self._bounds.max_tokens_per_minute
        if most is None:
            return
        self._refill()
        if self._tokens_left > 0:
            return
        wait_s = max(1, math.ceil(-self._tokens_left * _MINUTE_S / most))
        self._counters.asked(Outcome.MAX_TOKENS_PER_MINUTE)
        raise KeyLimitError(
            f"The API key {self.name!r} has used its {most} tokens of a minute "
            f"(max_tokens_per_minute); there are some again in {wait_s} s.",
            Outcome.MAX_TOKENS_PER_MINUTE,
            most,
            wait_s,
        )

    def _refill(self) -> None:
        """Add the tokens of the time that has passed, up to those of a minute."""
        now, most = self._clock(), self._bounds.max_tokens_per_minute
        if most is not None:
            gained = (now - self._filled_at) * most / _MINUTE_S
            self._tokens_left = min(float(most), self._tokens_left + gained)
        self._filled_at = now


def _answers(num: int) -> str:
    return f"{num} answer{'s' * (num != 1)}"
