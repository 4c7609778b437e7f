"""Bounds of keys over HTTP: a crowd of one key, and another key beside it."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.access.log_reader import lines_of
from tests.servers.processes import Server, running_server

MAX_RUNNING, NUM = 2, 40
BODY = {"prompt": [7] * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
KEYS = json.dumps(
    [
        {"name": "crowd", "max_running": MAX_RUNNING},
        {"name": "minute", "max_requests_per_minute": 2},
    ]
)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two bounded keys and one that is not; four sequences run at a time."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("crowd:secret-c\nminute:secret-m\nother:secret-o\n")
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


async def ask(client: httpx.AsyncClient, key: str, **changes: Any) -> httpx.Response:
    """A completion."""
    return await client.post("/v1/completions", json={**BODY, **changes}, headers=bearer(key))


def test_a_crowd_keeps_to_its_bounds_and_another_key_is_served(limited: Server) -> None:
    """Each of the crowd is answered or refused at once, and every counter agrees."""
    counters = ("ropewalk_key_requests_total", "ropewalk_key_tokens_total")
    before = [series(limited, each) for each in counters]

    async def crowd() -> tuple[list[httpx.Response], httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=limited.url, timeout=240, limits=limits) as client:
            many = asyncio.gather(*(ask(client, "c") for _ in range(NUM)))
            other = await ask(client, "o", max_tokens=10)
            return await many, other

    answers, other = asyncio.run(crowd())
    assert other.status_code == 200
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("key_limit_reached", "rate_limit_error")
            assert (error["limit"], error["limit_value"]) == ("max_running", MAX_RUNNING)
            assert answer.headers["retry-after"] == "1"
    requests, tokens = (gained(limited, *each) for each in zip(counters, before, strict=True))
    assert requests["crowd", "accepted"] == statuses[200]
    assert requests["crowd", "max_running"] == statuses[429]
    assert requests["other", "accepted"] == 1
    assert tokens["crowd", "prompt"] == 20 * statuses[200]
    assert tokens["crowd", "generated"] == 40 * statuses[200]
    assert set(series(limited, "ropewalk_key_requests_running").values()) == {0}
    lines = lines_of(limited, [*answers, other])
    assert Counter((each["key"], each["status"]) for each in lines) == {
        ("other", 200): 1,
        **{("crowd", status): count for status, count in statuses.items()},
    }


def test_requests_of_a_minute_are_counted(limited: Server) -> None:
    with httpx.Client(base_url=limited.url, timeout=240) as client:
        body = {**BODY, "max_tokens": 1}
        answers = [client.post("/v1/completions", json=body, headers=bearer("m")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["limit"] == "max_requests_per_minute"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
