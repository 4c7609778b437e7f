"""Server-sent events on the wire: headers, the first byte, comments, progress, several shapes."""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.api.asking import streamed
from tests.servers.processes import Server, running_server

pytestmark = pytest.mark.alone

KEEP_ALIVE_S = 0.05


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server with small chunks and early comments, so that a long prompt takes a while."""
    chunks = ("--max-num-batched-tokens", "32", "--step-target-seconds", "0")  # 32, by any clock
    arguments = (*chunks, "--sse-keep-alive-seconds", str(KEEP_ALIVE_S))
    with running_server(*arguments) as running:
        yield running


def test_headers_keep_proxies_from_buffering(slow: Server) -> None:
    """One header against buffering is nginx's own, the others are standard."""
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    with httpx.stream("POST", f"{slow.url}/v1/completions", json=body) as answer:
        answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"


def test_a_byte_comes_early_and_comments_until_the_first_token(slow: Server) -> None:
    """During a long prefill, no silence is much longer than the setting."""
    body = {"prompt": [7] * 2000, "max_tokens": 2, "stream": True, "cache_salt": "early"}
    payload = json.dumps(body).encode()
    host, port = slow.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    arrivals: list[float] = []
    received = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        began = time.monotonic()
        connection.sendall(head.encode() + payload)
        while piece := connection.recv(65536):
            arrivals.append(time.monotonic() - began)
            received += piece
    text = received.decode()
    first_token = text.index("data: {")
    comments = text[:first_token].count(": keep-alive")
    assert text.index(": open\n\n") < text.index(": keep-alive\n\n") < first_token
    assert comments >= 3
    assert arrivals[0] < arrivals[-1] / 2, "the headers came long before the answer"
    longest_silence = max(later - earlier for earlier, later in itertools.pairwise(arrivals))
    assert longest_silence < arrivals[-1] / 2


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_progress_counts_the_prompt_up(slow: Server, route: str) -> None:
    """Each chunk sends llama.cpp's fields: total, cached, processed, milliseconds."""
    num_words = 300
    text = "import os\n" * num_words
    said: dict[str, Any] = {"prompt": text}
    if route != "completions":
        said = {"messages": [{"role": "user", "content": text}]}
    body = {**said, "max_tokens": 3, "return_progress": True, "cache_salt": route}
    events = streamed(slow, route, **body)
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert all(event["choices"] == [] for event in events if "prompt_progress" in event)
    totals = {each["total"] for each in told}
    assert len(totals) == 1
    total = totals.pop()
    assert [each["processed"] for each in told] == [*range(32, total, 32), total]
    assert {(each["index"], each["cache"]) for each in told} == {(0, 0)}
    times = [each["time_ms"] for each in told]
    assert times == sorted(times)
    assert times[-1] > times[0] > 0
    first_text = next(index for index, event in enumerate(events) if event["choices"])
    assert not any("prompt_progress" in event for event in events[first_text:])

    again = streamed(slow, route, **body)
    told = [event["prompt_progress"] for event in again if "prompt_progress" in event]
    assert told[0]["cache"] >= total - 32
    assert told[-1]["processed"] == total


def test_without_it_there_is_no_progress(slow: Server) -> None:
    """Events without requested progress have no field for it."""
    body = {"prompt": [7] * 100, "max_tokens": 2, "cache_salt": "none"}
    assert not any("prompt_progress" in each for each in streamed(slow, "completions", **body))
