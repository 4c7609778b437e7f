"""Metrics by the name of the API key. Names come from the configuration, never from a client."""

import enum
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from server.metrics import MetricFactory


class Outcome(enum.StrEnum):
    """The outcome of a request at its key's bounds; the last three name the bound."""

    ACCEPTED = "accepted"
    LEFT = "left"  # the client closed the connection while it waited
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
