"""The bounds of one key at work: answers at a time, and requests a minute, on the event loop."""

import enum
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.access.keys import KeyBounds
from ropewalk.server.access.refusals import KeyLimitError
from ropewalk.server.metrics import MetricFactory


class Outcome(enum.StrEnum):
    """The outcome of a request at its key's bounds; the last two name the bound."""

    ACCEPTED = "accepted"
    MAX_RUNNING = "max_running"
    MAX_REQUESTS_PER_MINUTE = "max_requests_per_minute"


@dataclass(frozen=True, slots=True)
class KeyCounters:
    """The series of one name."""

    requests: dict[Outcome, Counter]
    prompt_tokens: Counter
    generated_tokens: Counter
    running: Gauge

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

    def of(self, name: str) -> KeyCounters:
        """Return the series of a name, at zero if they are new."""
        return KeyCounters(
            {outcome: self._requests.labels(name, outcome.value) for outcome in Outcome},
            self._tokens.labels(name, "prompt"),
            self._tokens.labels(name, "generated"),
            self._running.labels(name),
        )

    def forget(self, name: str) -> None:
        """Remove the series of a name that is no longer configured."""
        for outcome in Outcome:
            self._requests.remove(name, outcome.value)
        for kind in ("prompt", "generated"):
            self._tokens.remove(name, kind)
        self._running.remove(name)


_MINUTE_S = 60.0
_RETRY_S = 1  # at the least: when an answer will end is not known


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
        self._requests_left = float(bounds.max_requests_per_minute or 0)
        self._filled_at = clock()

    def rebound(self, bounds: KeyBounds) -> None:
        """Apply other bounds from now on. Answers that run are left alone."""
        before = self._bounds.max_requests_per_minute
        self._refill()
        self._bounds = bounds
        if before is None:
            self._requests_left = float(bounds.max_requests_per_minute or 0)

    def enter(self, num: int) -> None:
        """Take the places of `num` answers, which `leave` gives back.

        Raises KeyLimitError, or RequestError for more than may ever run.
        """
        self._check_running(num)
        self._take_request()
        self._set_running(self._num_running + num)
        self._counters.asked(Outcome.ACCEPTED)

    def leave(self, num: int) -> None:
        """Give back the places of `num` answers."""
        self._set_running(self._num_running - num)

    def used(self, num_prompt_tokens: int, num_generated: int) -> None:
        """Count tokens."""
        self._counters.used(num_prompt_tokens, num_generated)

    def _set_running(self, num: int) -> None:
        self._num_running = num
        self._counters.running.set(num)

    def _check_running(self, num: int) -> None:
        """Refuse more answers than may run at once. Raises KeyLimitError or RequestError."""
        most = self._bounds.max_running
        if most is None or self._num_running + num <= most:
            return
        self._counters.asked(Outcome.MAX_RUNNING)
        if num > most:  # it could never start
            raise RequestError(
                f"The request wants {num} answers (prompts x n); the API key {self.name!r} may "
                f"have {most} at once (max_running).",
                param="n",
                code="too_many_answers",
            )
        raise KeyLimitError(
            f"The API key {self.name!r} may have {most} answer{'s' * (most != 1)} at a time "
            f"(max_running); {self._num_running} of them run{'s' * (self._num_running == 1)}.",
            Outcome.MAX_RUNNING,
            most,
            _RETRY_S,
        )

    def _take_request(self) -> None:
        """Count a request of this minute. Raises KeyLimitError if none is left."""
        most = self._bounds.max_requests_per_minute
        if most is None:
            return
        self._refill()
        if self._requests_left < 1:
            wait_s = math.ceil((1 - self._requests_left) * _MINUTE_S / most)
            self._counters.asked(Outcome.MAX_REQUESTS_PER_MINUTE)
            raise KeyLimitError(
                f"The API key {self.name!r} has used its {most} requests of a minute "
                f"(max_requests_per_minute); there is one again in {wait_s} s.",
                Outcome.MAX_REQUESTS_PER_MINUTE,
                most,
                wait_s,
            )
        self._requests_left -= 1

    def _refill(self) -> None:
        """Add the requests of the time that has passed, up to those of a minute."""
        now, most = self._clock(), self._bounds.max_requests_per_minute
        if most is not None:
            gained = (now - self._filled_at) * most / _MINUTE_S
            self._requests_left = min(float(most), self._requests_left + gained)
        self._filled_at = now
