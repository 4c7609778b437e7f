"""Bounds of keys over HTTP: 200 requests at once, and another key beside them."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.access.log_reader import awaited_lines
from tests.servers.processes import Server, running_server

pytestmark = pytest.mark.alone

MAX_RUNNING, MAX_QUEUED, NUM = 2, 30, 200
BODY = {"prompt": [7] * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
KEYS = f'[{{"name": "crowd", "max_running": {MAX_RUNNING}, "max_queued": {MAX_QUEUED}}}]'


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a bounded key, and two that are not; four sequences run at a time."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("crowd:secret-c\nunbounded:secret-u\nother:secret-o\n")
    flags = ["--api-key-file", str(path), "--keys", KEYS, "--max-num-seqs", "4"]
    with running_server(*flags, "--max-num-batched-tokens", "256") as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"Authorization": f"Bearer secret-{key}"}


def series(server: Server, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by the values of its labels."""
    page = httpx.get(f"{server.url}/metrics", headers=bearer("o"), timeout=60).text
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def gained(
    server: Server, name: str, before: dict[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    """The difference of a counter to its values before, which other tests may have raised."""
    return {labels: value - before[labels] for labels, value in series(server, name).items()}


async def ask(client: httpx.AsyncClient, key: str, **changes: Any) -> tuple[httpx.Response, float]:
    """A completion and the seconds that it took."""
    began = time.monotonic()
    answer = await client.post("/v1/completions", json={**BODY, **changes}, headers=bearer(key))
    return answer, time.monotonic() - began


async def beside(
    url: str, crowd: str | None, num_ended: int = 0
) -> tuple[list[httpx.Response], list[float]]:
    """The answers to a crowd of requests of one key, and the times of another key meanwhile.

    The other key begins when `num_ended` of the crowd have an answer.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as client:
        many = [asyncio.create_task(ask(client, crowd)) for _ in range(NUM)] if crowd else []
        ends = asyncio.as_completed(many)
        for _ in range(num_ended):
            await next(ends)
        seconds = [(await ask(client, "o", max_tokens=10))[1] for _ in range(8)]
        return [answer for answer, _ in await asyncio.gather(*many)], seconds


@pytest.mark.costly
def test_a_crowd_keeps_to_its_bounds_and_another_key_does_not_wait(limited: Server) -> None:
    """Each of the 200 is answered or refused at once, and every counter agrees."""
    first = len(limited.log)
    counters = ("ropewalk_key_requests_total", "ropewalk_key_tokens_total")
    before = [series(limited, each) for each in counters]
    _, alone = asyncio.run(beside(limited.url, None))
    # A loaded machine takes seconds to read so many requests, whatever their bounds are.
    num_refused = NUM - MAX_RUNNING - MAX_QUEUED
    answers, bounded = asyncio.run(beside(limited.url, "c", num_refused))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses[200] >= MAX_RUNNING + MAX_QUEUED
    for answer in answers:
        if answer.status_code == 429:
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("key_limit_reached", "rate_limit_error")
            assert (error["limit"], error["limit_value"]) == ("max_queued", MAX_QUEUED)
            assert answer.headers["retry-after"] == "1"
    requests, tokens = (gained(limited, *each) for each in zip(counters, before, strict=True))
    assert sum(count for (key, _), count in requests.items() if key == "crowd") == NUM
    assert requests["crowd", "accepted"] == statuses[200]
    assert requests["crowd", "max_queued"] == statuses[429]
    assert requests["other", "accepted"] == 16
    assert tokens["crowd", "prompt"] == 20 * statuses[200]
    assert tokens["crowd", "generated"] == 40 * statuses[200]
    assert tokens["other", "generated"] == 16 * 10
    for gauge in ("running", "waiting"):
        assert set(series(limited, f"ropewalk_key_requests_{gauge}").values()) == {0}
    lines = awaited_lines(limited, first, NUM + 16)
    assert Counter((each["key"], each["status"]) for each in lines) == {
        ("other", 200): 16,
        **{("crowd", status): count for status, count in statuses.items()},
    }
    # The same crowd without bounds fills the engine's queue, and the other key waits behind it.
    _, unbounded = asyncio.run(beside(limited.url, "u", 1))
    assert max(bounded) < max(unbounded) / 3, (alone, bounded, unbounded)


def test_no_more_run_or_wait_than_the_bounds_say(limited: Server) -> None:
    """The gauges are read all along, and `n` counts each answer."""
    seen: list[tuple[float, float]] = []

    async def crowd() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=limited.url, timeout=240, limits=limits) as client:
            asked = [ask(client, "c", n=1 + at % 2, max_tokens=120) for at in range(NUM)]
            many = asyncio.gather(*asked)
            while not many.done():
                found = await asyncio.gather(
                    *(
                        asyncio.to_thread(series, limited, f"ropewalk_key_requests_{each}")
                        for each in ("running", "waiting")
                    )
                )
                seen.append((found[0]["crowd",], found[1]["crowd",]))
                await asyncio.sleep(0.02)
            return [answer for answer, _ in await many]

    deadline = time.monotonic() + 120
    most = (0.0, 0.0)
    while 0 in most:  # a loaded machine may read the gauges before the crowd and after it only
        assert time.monotonic() < deadline
        assert {answer.status_code for answer in asyncio.run(crowd())} == {200, 429}
        most = (max(running for running, _ in seen), max(waiting for _, waiting in seen))
    assert most[0] <= MAX_RUNNING
    assert most[1] <= MAX_QUEUED


def test_a_waiting_client_that_leaves_is_forgotten(limited: Server) -> None:
    """It has a line with the status 499, and computes nothing."""
    counters = ("ropewalk_key_requests_total", "ropewalk_key_tokens_total")
    before = [series(limited, each) for each in counters]
    first = len(limited.log)

    async def case() -> None:
        async with httpx.AsyncClient(base_url=limited.url, timeout=240) as client:
            long = asyncio.create_task(ask(client, "c", n=2, max_tokens=1000, temperature=2))
            while series(limited, "ropewalk_key_requests_running")["crowd",] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=BODY, headers=bearer("c"), timeout=0.2)
            await long

    asyncio.run(case())
    lines = awaited_lines(limited, first, 2)
    assert [(each["status"], each["aborted"]) for each in lines] == [(499, True), (200, False)]
    requests, tokens = (gained(limited, *each) for each in zip(counters, before, strict=True))
    assert tokens["crowd", "prompt"] == 20
    assert requests["crowd", "left"] == 1


def test_the_time_of_a_request_runs_while_it_waits_for_its_key(limited: Server) -> None:
    """It is refused as one that waits in the queue, and leaves its place to others."""
    before = series(limited, "ropewalk_key_requests_total")

    async def case() -> httpx.Response:
        async with httpx.AsyncClient(base_url=limited.url, timeout=240) as client:
            long = asyncio.create_task(ask(client, "c", n=2, max_tokens=1000, temperature=2))
            while series(limited, "ropewalk_key_requests_running")["crowd",] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            answer, _ = await ask(client, "c", max_time=0.2)
            await long
            return answer

    answer = asyncio.run(case())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    gains = gained(limited, "ropewalk_key_requests_total", before)
    assert (gains["crowd", "timeout"], gains["crowd", "accepted"]) == (1, 1)
    assert series(limited, "ropewalk_key_requests_waiting")["crowd",] == 0
