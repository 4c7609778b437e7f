"""The parts that all attacks on a server share: their cases, their bugs, the state afterwards."""

import json
import os
import threading
import time
from typing import Any

import httpx

from tests.server.fuzz.raw_http import Reply
from tests.server.test_metrics import value
from tests.servers.processes import Server

NUM_CASES = int(os.environ.get("FUZZ_CASES") or 200)
SEED = int(os.environ.get("FUZZ_SEED", "20260117"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
MOST_ERROR_BYTES = 10_000  # of an answer that refuses
_MOST_REPEATED = 320  # bytes of the input in a row; a model's name may have 256 characters
_BUSY = {"queue_full", "loading"}  # codes with which 429 and 503 say that it is for now


def is_busy(reply: Reply) -> bool:
    """Whether the answer is a 503 that states it is temporary."""
    try:
        return reply.status == 503 and json.loads(reply.body)["error"]["code"] in _BUSY
    except (ValueError, KeyError, TypeError):
        return False


def repeated(raw: bytes, reply: Reply) -> bytes | None:
    """A long piece of the input inside of the answer."""
    whole = reply.head.encode("latin-1") + reply.body
    for start in range(0, len(whole) - _MOST_REPEATED, 16):
        piece = whole[start : start + _MOST_REPEATED]
        if piece in raw:
            return piece
    return None


def ask_health(url: str, count: int, pause_s: float, over: threading.Event) -> list[float]:
    """The seconds of each answer of /health; every one must be 200."""
    seconds = []
    with httpx.Client(timeout=20) as client:
        for _ in range(count):
            if over.wait(pause_s):
                break
            began = time.monotonic()
            assert client.get(f"{url}/health").status_code == 200
            seconds.append(time.monotonic() - began)
    return seconds


def greedy(server: Server) -> Any:
    """The answer to a fixed request, without the parts that always differ (id, time)."""
    body = {"prompt": "The length of a rope", "max_tokens": 24, "temperature": 0, "logprobs": 3}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    answer.raise_for_status()
    return json.dumps(answer.json()["choices"])


def wait_until_idle(server: Server, limit_s: float = 15) -> dict[str, float]:
    """The gauges, once they are zero or the time is over."""
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    deadline = time.monotonic() + limit_s
    while True:
        gauges = {name: value(server, name) for name in names}
        if not any(gauges.values()) or time.monotonic() > deadline:
            return gauges
        time.sleep(0.05)
