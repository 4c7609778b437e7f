"""The requests and numbers of each scenario, against a server whose delays are known."""

import asyncio
import random

import pytest

from benchmarks.scenarios import (
    FIRST_TOKEN,
    LONG_FIRST_TOKEN,
    LONG_WHOLE,
    OUTPUT,
    P95_FIRST_TOKEN,
    P95_GAP,
    SHORT_FIRST_TOKEN,
    WALL,
    AtOnce,
    InFlight,
    Mixed,
    Outcome,
    Scenario,
    Turns,
)
from benchmarks.sending import FIRST_ID, Prompts, Sender
from ropewalk.studies.bench.load import open_client
from ropewalk.studies.bench.target import find_target
from tests.servers.sse_server import DONE, Script, SseServer, data, serving, token

pytestmark = pytest.mark.alone

VOCAB = 64


def run(scenario: Scenario, server: SseServer) -> Outcome:
    """Run a scenario once, with prompts of a small vocabulary."""

    async def measured() -> Outcome:
        async with open_client(None, scenario.concurrency, 60) as client:
            sender = Sender(client, await find_target(client, server.url, None), 60)
            return await scenario.run(sender, Prompts(random.Random(1), VOCAB))

    return asyncio.run(measured())


def answer(num_prompt: int, num_output: int, first_s: float = 0.0, gap_s: float = 0.0) -> Script:
    """Tokens with equal gaps, after so many seconds."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return [(first_s, token()), *[(gap_s, token())] * (num_output - 1),
            (0, data(choices=[], usage=usage)), (0, DONE)]  # fmt: skip


def test_a_batch_is_in_flight_at_once() -> None:
    """The rate of a batch is all of its tokens over the time to the last end."""
    with serving(SseServer(lambda number: answer(20, 4, 0.2 if number else 0.6))) as server:
        outcome = run(AtOnce("batch", OUTPUT, 0, 20, 4, 5), server)
    assert server.most_in_flight == 5
    assert outcome.num_tokens == 20
    assert 20 / 1.5 < outcome.values[OUTPUT] <= 20 / 0.6


def test_each_turn_extends_the_prompt_before_it() -> None:
    """The time of the turns is their sum, and the first turn's first token is left out."""
    delays_s = (0.6, 0.1, 0.2)
    with serving(SseServer(lambda turn: answer(8 + 5 * turn, 2, delays_s[turn]))) as server:
        outcome = run(Turns(first_len=8, turn_len=5, output_len=2, num_turns=3), server)
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(each) for each in prompts] == [8, 13, 18]
    assert prompts[1][:8] == prompts[0]
    assert prompts[2][:13] == prompts[1]
    assert outcome.values[WALL] >= sum(delays_s)
    assert 0.1 <= outcome.values[FIRST_TOKEN] < 0.6
    assert server.most_in_flight == 1


def test_a_shared_prefix_is_shared_and_nothing_else_is() -> None:
    """All prompts share 30 tokens, and their tails differ."""
    with serving(SseServer(lambda _: answer(40, 2, 0.1))) as server:
        outcome = run(AtOnce("prefix", WALL, 30, 10, 2, 6), server)
    prompts = [body["prompt"] for body in server.bodies]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 6
    assert all(FIRST_ID <= each < VOCAB for prompt in prompts for each in prompt)
    assert 0.1 <= outcome.values[WALL] < 1


def test_the_next_request_is_sent_when_one_ends() -> None:
    """Two of six are in flight; the last one to be sent has the slowest first token."""
    with serving(SseServer(lambda number: answer(20, 4, 0.1 if number < 5 else 0.5))) as server:
        outcome = run(InFlight("queue", 20, 4, 6, 2), server)
    assert server.most_in_flight == 2
    assert (len(server.bodies), outcome.num_tokens) == (6, 24)
    assert 24 / 1.5 < outcome.values[OUTPUT] <= 24 / 0.7
    assert outcome.values[P95_FIRST_TOKEN] >= 0.3  # between the last two of six


def test_the_time_between_tokens_is_over_all_answers_in_flight() -> None:
    """One of two answers has long gaps, so they are three of six."""
    with serving(SseServer(lambda number: answer(20, 4, 0, 0.2 if number else 0))) as server:
        outcome = run(InFlight("queue", 20, 4, 2, 1), server)
    assert 0.19 <= outcome.values[P95_GAP] < 0.6


MIXED = Mixed("mixed", 100, 20, 3, 8, first_ms=100, every_ms=20)


def test_short_requests_come_while_the_long_prompt_is_read() -> None:
    """The p95 of each short request counts from the moment when it was sent."""
    with serving(
        SseServer(lambda number: answer(20, 3, 0.05) if number else answer(100, 3, 1.0))
    ) as server:
        outcome = run(MIXED, server)
    assert [len(body["prompt"]) for body in server.bodies] == [100, *[20] * 8]
    assert outcome.remark is None
    assert 0.05 <= outcome.values[SHORT_FIRST_TOKEN] < 0.5
    assert 1.0 <= outcome.values[LONG_FIRST_TOKEN] <= outcome.values[LONG_WHOLE] < 1.5


def test_short_requests_that_came_too_late_are_told() -> None:
    """Short requests that arrive after the long prefill measure nothing of it."""
    with serving(SseServer(lambda number: answer(20 if number else 100, 3))) as server:
        outcome = run(MIXED, server)
    assert outcome.remark is not None
    assert outcome.remark.startswith("8 of 8 short requests were sent after")
