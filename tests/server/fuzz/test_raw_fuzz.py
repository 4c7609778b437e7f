"""Hostile bytes over plain sockets are answered briefly or refused, and leave no trace.

FUZZ_CASES, FUZZ_SEED and FUZZ_FIRST choose which cases; a failure prints the line that repeats it.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.server.fuzz.attack import (
    FIRST,
    MOST_ERROR_BYTES,
    NUM_CASES,
    SEED,
    ask_health,
    greedy,
    is_busy,
    repeated,
    wait_until_idle,
)
from tests.server.fuzz.fuzz_requests import Case, case
from tests.server.fuzz.raw_http import (
    NoAnswerError,
    Reply,
    address_of,
    exchange,
    request,
)
from tests.server.test_metrics import value
from tests.servers.processes import Server, peak_mib, rss_mib
from tests.servers.progress import say

pytestmark = pytest.mark.alone

_WORKERS = 3
_LEAST_HEALTH_S = 0.05  # a busy neighbour may have a turn of both processors


@dataclass
class Seen:
    """The answers that all workers saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)


def problem(sent: Case, replies: list[Reply]) -> str | None:
    """The fault of the answers, or None."""
    if not replies and not sent.may_be_silent and len(sent.raw) < 30_000:
        return "closed without an answer"
    for reply in replies:
        if not reply.is_whole and not sent.is_head:
            return f"an answer that is none or breaks off: {reply.head[:100]!r}"
        if reply.status >= 500 and not is_busy(reply):
            return f"{reply.status}: {reply.body[:300]!r}"
        if reply.status >= 400 and len(reply.head) + len(reply.body) > MOST_ERROR_BYTES:
            return f"{reply.status} of {len(reply.head)} + {len(reply.body)} bytes"
        if reply.status >= 400 and (piece := repeated(sent.raw, reply)):
            return f"{reply.status} repeats the input: {piece[:80]!r}"
    return None


def attack(address: tuple[str, int], number: int, seen: Seen) -> None:
    """Send one case and note its answers."""
    sent = case(SEED, number)
    seen.kinds[sent.kind] += 1
    wrong: str | None
    try:
        limit_s = 0.05 if sent.may_be_silent else 20
        replies = exchange(
            address, sent.raw, num_replies=1 if sent.is_head else sent.num_replies, limit_s=limit_s
        )
        seen.statuses.update(reply.status for reply in replies)
        wrong = problem(sent, replies)
    except NoAnswerError as error:
        wrong = None if sent.may_be_silent or sent.is_head else str(error)
    except OSError as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        repeat = f"make fuzz FUZZ_SEED={SEED} FUZZ_FIRST={number} FUZZ_CASES=1"
        seen.failures.append(f"{sent.kind} {wrong}\n    {sent.raw[:300]!r}\n    again: {repeat}")


@contextmanager
def watched_health(url: str, seen: Seen) -> Iterator[None]:
    """Request /health all the while."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_health, url, 1_000_000, 0.03, over)
        try:
            yield
        finally:
            over.set()
        seen.health_s = asking.result()


@pytest.mark.timeout(0 if NUM_CASES > 5000 else 300)
def test_hostile_bytes_are_answered_briefly_and_leave_nothing(attacked: Server) -> None:
    """There is no 5xx, no long answer and no echo, and /health stays quick meanwhile."""
    say(f"\nFUZZ_SEED={SEED} FUZZ_FIRST={FIRST} FUZZ_CASES={NUM_CASES}")
    seen, address, first_line = Seen(), address_of(attacked.url), len(attacked.log)
    before = greedy(attacked)
    idle_s = statistics.median(ask_health(attacked.url, 100, 0.01, threading.Event()))
    began = time.monotonic()
    with watched_health(attacked.url, seen), ThreadPoolExecutor(_WORKERS) as pool:
        numbers = range(FIRST, FIRST + NUM_CASES)
        for _ in pool.map(lambda number: attack(address, number, seen), numbers):
            pass
    busy_s = statistics.median(seen.health_s) if seen.health_s else 0
    say(f"{NUM_CASES} cases in {time.monotonic() - began:.1f} s; {dict(seen.statuses)}")
    say(str(dict(seen.kinds)))
    say(f"/health: {idle_s * 1000:.2f} ms idle, {busy_s * 1000:.2f} ms meanwhile (medians)")
    assert not seen.failures, f"{len(seen.failures)} failures\n" + "\n".join(seen.failures[:20])
    assert busy_s <= max(3 * idle_s, _LEAST_HEALTH_S)
    assert wait_until_idle(attacked) == dict.fromkeys(wait_until_idle(attacked), 0.0)
    assert greedy(attacked) == before
    said = attacked.log[first_line:]
    errors = [line for line in said if "level=error" in line or "never retrieved" in line]
    assert not errors, "".join(errors[:5])


@pytest.mark.parametrize("body", [b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "\xff"}'])
def test_every_refused_body_is_counted(attacked: Server, body: bytes) -> None:
    """Refused bodies have the reason `invalid`, like any other body that is no JSON."""
    before = value(attacked, "requests_rejected_total", reason="invalid")
    (reply,) = exchange(address_of(attacked.url), request(body))
    assert reply.status == 400
    assert value(attacked, "requests_rejected_total", reason="invalid") == before + 1


def test_a_large_body_costs_little_more_than_itself(attacked: Server) -> None:
    """The body is below max_body_bytes; /proc gives the peak of the process's memory."""
    before_mib = rss_mib(attacked.pid)
    raw = request(b'{"prompt": "' + b"a" * (7 * 2**20) + b'"}')
    (reply,) = exchange(address_of(attacked.url), raw, limit_s=60)
    assert reply.status == 400
    assert peak_mib(attacked.pid) - before_mib < 150
