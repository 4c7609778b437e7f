"""The scenarios: the requests of each, and their metrics."""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from benchmarks.compare.ratios import Metric
from benchmarks.compare.sending import Answer, Prompts, Request, Sender
from ropewalk.studies.bench.report import percentile

Result = TypeVar("Result")

DECODE = Metric("decode", "tokens/s", higher_is_better=True)
OUTPUT = Metric("output", "tokens/s", higher_is_better=True)
FIRST_TOKEN = Metric("time to first token", "s", higher_is_better=False)
WALL = Metric("wall time", "s", higher_is_better=False)
SHORT_FIRST_TOKEN = Metric("short requests' p95 time to first token", "s", higher_is_better=False)
P95_FIRST_TOKEN = Metric("p95 time to first token", "s", higher_is_better=False)
P95_GAP = Metric("p95 time between tokens", "s", higher_is_better=False)
LONG_FIRST_TOKEN = Metric("long request's time to first token", "s", higher_is_better=False)
LONG_WHOLE = Metric("long request's time", "s", higher_is_better=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The values of one scenario in one round, with the counts that a reader can check."""

    values: dict[Metric, float]
    num_tokens: int  # generated
    num_events: int  # that carried these tokens
    remark: str | None = None


class Scenario(Protocol):
    """One scenario. Its fields are its sizes."""

    @property
    def name(self) -> str:
        """Return the name, as in the record and in --scenarios."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of an outcome, the most important first."""

    @property
    def longest(self) -> int:
        """Return the positions of its longest request, in tokens."""

    @property
    def concurrency(self) -> int:
        """Return the largest number of requests in flight."""

    async def run(self, sender: Sender, prompts: Prompts) -> Outcome:
        """Send all requests once, and return the outcome. Raises ScenarioError."""


def sizes(scenario: Scenario) -> dict[str, int]:
    """Return the integer fields of a scenario, as the record stores them."""
    fields: dict[str, Any] = asdict(scenario)  # type: ignore[call-overload]  # all are dataclasses
    return {name: value for name, value in fields.items() if isinstance(value, int)}


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Requests that are sent one after the other."""

    name: str
    metrics: tuple[Metric, ...]
    prompt_len: int
    output_len: int
    num_requests: int
    concurrency: int = 1

    @property
    def longest(self) -> int:
        return self.prompt_len + self.output_len

    async def run(self, sender: Sender, prompts: Prompts) -> Outcome:
        """Return the medians over the requests."""
        answers = []
        for _ in range(self.num_requests):
            request = Request(prompts.ids(self.prompt_len), self.output_len)
            answers.append(await sender.send(request, sender.body(request)))
        found = {
            DECODE: percentile([each.decode_tokens_per_s for each in answers], 50),
            FIRST_TOKEN: percentile([each.time_to_first_token_s for each in answers], 50),
        }
        return _outcome({metric: found[metric] for metric in self.metrics}, answers)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Requests that are sent at once, with a common prefix and then tokens of their own."""

    name: str
    metric: Metric
    prefix_len: int
    own_len: int
    output_len: int
    num_requests: int

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (self.metric,)

    @property
    def longest(self) -> int:
        return self.prefix_len + self.own_len + self.output_len

    @property
    def concurrency(self) -> int:
        return self.num_requests

    async def run(self, sender: Sender, prompts: Prompts) -> Outcome:
        """Measure the time to the last end, prefill included. The prefix is new each time."""
        prefix = prompts.ids(self.prefix_len)
        requests = [
            Request(
                [*prefix, *prompts.ids(self.own_len)],
                self.output_len,
                may_be_cached=self.prefix_len > 0,
            )
            for _ in range(self.num_requests)
        ]
        answers, wall_s = await _together(sender, requests, [0] * self.num_requests)
        found = {OUTPUT: sum(each.num_output for each in answers) / wall_s, WALL: wall_s}
        return _outcome({self.metric: found[self.metric]}, answers)


@dataclass(frozen=True, slots=True)
class Turns:
    """One conversation: each turn's prompt is the one before it with further tokens.

    The further tokens stand for the answer and the next question. The client draws them, so that
    all servers read the same numbers of tokens.
    """

    name: str = "turns"
    first_len: int = 512
    turn_len: int = 128
    output_len: int = 32
    num_turns: int = 10
    concurrency: int = 1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (WALL, FIRST_TOKEN)

    @property
    def longest(self) -> int:
        return self.first_len + (self.num_turns - 1) * self.turn_len + self.output_len

    async def run(self, sender: Sender, prompts: Prompts) -> Outcome:
        """Return the time of all turns, and the median first token of those after the first."""
        prompt, answers = prompts.ids(self.first_len), []
        for turn in range(self.num_turns):
            request = Request(prompt, self.output_len, may_be_cached=turn > 0)
            answers.append(await sender.send(request, sender.body(request)))
            prompt = [*prompt, *prompts.ids(self.turn_len)]
        first_s = percentile([each.time_to_first_token_s for each in answers[1:]], 50)
        wall_s = sum(each.end_to_end_s for each in answers)
        return _outcome({WALL: wall_s, FIRST_TOKEN: first_s}, answers)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests of which a fixed number is in flight: one ends, and the next is sent."""

    name: str
    prompt_len: int
    output_len: int
    num_requests: int
    concurrency: int
    metrics: tuple[Metric, ...] = (OUTPUT, P95_FIRST_TOKEN, P95_GAP)

    @property
    def longest(self) -> int:
        return self.prompt_len + self.output_len

    async def run(self, sender: Sender, prompts: Prompts) -> Outcome:
        """Measure the rate to the last end, times to first tokens, and times between tokens."""
        waiting = [
            Request(prompts.ids(self.prompt_len), self.output_len) for _ in range(self.num_requests)
        ]
        answers: list[Answer] = []

        async def send_next() -> None:
            while waiting:
                request = waiting.pop()
                answers.append(await sender.send(request, sender.body(request)))

        began = time.perf_counter()
        await _all_of(send_next() for _ in range(self.concurrency))
        wall_s = time.perf_counter() - began
        firsts = [each.time_to_first_token_s for each in answers]
        found = {
            OUTPUT: sum(each.num_output for each in answers) / wall_s,
            P95_FIRST_TOKEN: percentile(firsts, 95),
            P95_GAP: percentile([gap for each in answers for gap in each.inter_token_s], 95),
        }
        return _outcome({metric: found[metric] for metric in self.metrics}, answers)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Short requests that arrive during the prefill of one long prompt."""

    name: str = "mixed"
    long_len: int = 8192
    short_len: int = 64
    output_len: int = 8
    num_short: int = 24
    first_ms: int = 100  # after the long request
    every_ms: int = 25  # between two short requests

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (SHORT_FIRST_TOKEN, LONG_FIRST_TOKEN, LONG_WHOLE)

    @property
    def longest(self) -> int:
        return self.long_len + self.output_len

    @property
    def concurrency(self) -> int:
        return self.num_short + 1

    async def run(self, sender: Sender, prompts: Prompts) -> Outcome:
        """Send short requests at fixed times, which do not depend on the server."""
        long = Request(prompts.ids(self.long_len), self.output_len)
        shorts = [
            Request(prompts.ids(self.short_len), self.output_len) for _ in range(self.num_short)
        ]
        delays_ms = [0, *(self.first_ms + self.every_ms * place for place in range(self.num_short))]
        (whole, *parts), _ = await _together(sender, [long, *shorts], delays_ms)
        read_s = whole.sent_s + whole.time_to_first_token_s
        num_late = sum(each.sent_s > read_s for each in parts)
        return _outcome(
            {
                SHORT_FIRST_TOKEN: percentile([each.time_to_first_token_s for each in parts], 95),
                LONG_FIRST_TOKEN: whole.time_to_first_token_s,
                LONG_WHOLE: whole.end_to_end_s,
            },
            [whole, *parts],
            f"{num_late} of {self.num_short} short requests were sent after the long prompt was "
            "read" if num_late else None,
        )  # fmt: skip


async def _together(
    sender: Sender, requests: Sequence[Request], delays_ms: Sequence[int]
) -> tuple[list[Answer], float]:
    """Send each request after its delay; return the answers and the seconds to the last end.

    Raises ScenarioError as soon as one request does; the others are cancelled.
    """
    bodies = [sender.body(each) for each in requests]
    began = time.perf_counter()

    async def send_at(due_s: float, request: Request, body: bytes) -> Answer:
        await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
        return await sender.send(request, body)

    answers = await _all_of(
        send_at(delay_ms / 1000, request, body)
        for delay_ms, request, body in zip(delays_ms, requests, bodies, strict=True)
    )
    return answers, time.perf_counter() - began


async def _all_of(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run works at once and return their results; raise the first error itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _outcome(
    values: dict[Metric, float], answers: Sequence[Answer], remark: str | None = None
) -> Outcome:
    return Outcome(
        values,
        sum(each.num_output for each in answers),
        sum(each.num_events for each in answers),
        remark,
    )


def _context(prompt_len: int) -> OneByOne:
    return OneByOne(f"context-{prompt_len}", (DECODE,), prompt_len, 64, 1)


def _prefill(prompt_len: int, num_requests: int) -> OneByOne:
    return OneByOne(f"prefill-{prompt_len}", (FIRST_TOKEN,), prompt_len, 8, num_requests)


SCENARIOS: tuple[Scenario, ...] = (
    OneByOne("single", (DECODE, FIRST_TOKEN), prompt_len=64, output_len=128, num_requests=4),
    AtOnce("batch", OUTPUT, prefix_len=0, own_len=128, output_len=64, num_requests=8),
    _prefill(512, 4),
    _prefill(2048, 2),
    _prefill(8192, 1),
    AtOnce("prefix", WALL, prefix_len=1024, own_len=32, output_len=8, num_requests=16),
    Turns(),
    Mixed(),
    *(_context(256 << doubling) for doubling in range(7)),
    OneByOne("large-single", (DECODE, FIRST_TOKEN), prompt_len=64, output_len=64, num_requests=1),
    InFlight("large-batch", prompt_len=128, output_len=32, num_requests=16, concurrency=8),
    OneByOne("large-prefill", (FIRST_TOKEN,), prompt_len=2048, output_len=2, num_requests=1),
)


def choose_scenarios(text: str | None) -> tuple[Scenario, ...]:
    """Return the scenarios of a list like `single,context`, or all of them for None.

    A word names a scenario if it is the name, or the part of the name before the first dash. Raises
    ValueError for a word that names none.
    """
    if text is None:
        return SCENARIOS
    words = text.split(",")
    for word in words:
        if not any(_is_named(each, word) for each in SCENARIOS):
            names = ", ".join(each.name for each in SCENARIOS)
            raise ValueError(f"there is no scenario {word!r}; there are {names}")
    return tuple(each for each in SCENARIOS if any(_is_named(each, word) for word in words))


def _is_named(scenario: Scenario, word: str) -> bool:
    return word in (scenario.name, scenario.name.partition("-")[0])
