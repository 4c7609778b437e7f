"""Clients that are slow on purpose do not delay others, and everything is freed afterwards."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from socket import AF_INET, IPPROTO_TCP, SO_RCVBUF, SOCK_STREAM, SOL_SOCKET, TCP_MAXSEG, socket

import httpx
import pytest

from tests.server.fuzz.attack import ask_health, greedy, wait_until_idle
from tests.server.fuzz.raw_http import address_of, exchange, request
from tests.server.load.soak_watch import settle, wait_for
from tests.server.test_metrics import samples, value
from tests.servers.processes import Server, num_descriptors, rss_mib, running_server
from tests.servers.progress import say

pytestmark = pytest.mark.alone

_SLOW = 50  # clients that send a byte now and then
_SLOW_S = float(os.environ.get("SLOW_SECONDS", "2"))  # for so long
_STREAMS = 64  # that no client reads
_LEAST_S = 0.005  # three times the idle median, but no less than this: two shared cores
_MOST_GROWTH_MIB = 150
_MOST_CONNECTIONS = 200
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaa"
_BODY = request(b'{"prompt": "a"' + b" " * 200 + b"}")
_STREAM = request(
    b'{"prompt": "a", "max_tokens": 150, "ignore_eos": true, "stream": true, "logprobs": 20}'
)


def _completion(part: str, count: int) -> bytes:
    return request(f'{{"prompt": [{",".join([part] * count)}]}}'.encode())


def _chat(before: str, part: str, count: int, after: str) -> bytes:
    body = f"{before}{','.join([part] * count)}{after}"
    return request(body.encode(), "/v1/chat/completions")


# Just below 139,264 values, or 1,179,648 bytes: the limits of a context of 2,048 tokens.
COSTLY: dict[str, Callable[[], bytes]] = {
    "lists": lambda: _completion("[]", 138_000),
    "parts": lambda: _chat(
        '{"messages": [{"role": "user", "content": [',
        '{"type": "text", "text": "a"}',
        38_000,
        "]}]}",
    ),
    "messages": lambda: _chat('{"messages": [', '{"role": "user", "content": "a"}', 33_000, "]}"),
    "keys": lambda: request(
        b'{"prompt": "a", "logit_bias": {%b}}'
        % b",".join(b'"%07d": 1' % each for each in range(80_000))
    ),
}


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """A server with room for all the streams at once."""
    flags = ("--max-num-seqs", str(_STREAMS), "--max-connections", str(_MOST_CONNECTIONS))
    with running_server(*flags) as running:
        greedy(running)
        settle(running.pid)
        yield running


@contextmanager
def opened(server: Server, count: int, *, tiny: bool = False) -> Iterator[list[socket]]:
    """So many connections, closed at the end.

    `tiny`: with the smallest segments and buffer, so that the server's kernel keeps no megabytes
    for a client that takes nothing.
    """
    with ExitStack() as at_the_end:
        made = []
        for _ in range(count):
            sock = at_the_end.enter_context(socket(AF_INET, SOCK_STREAM))
            sock.settimeout(20)
            if tiny:
                sock.setsockopt(SOL_SOCKET, SO_RCVBUF, 2048)
                sock.setsockopt(IPPROTO_TCP, TCP_MAXSEG, 536)
            sock.connect(address_of(server.url))
            made.append(sock)
        yield made


def drip(socks: Sequence[socket], sent: bytes, first: int, over: threading.Event) -> None:
    """Send a byte to each of them five times a second, after the first ones at once."""
    for number in range(len(sent) - first):
        piece = sent[:first] if number == 0 else sent[first + number : first + number + 1]
        for sock in socks:
            with suppress(OSError):  # the server may have had enough
                sock.sendall(piece)
        if over.wait(0.2):
            return


def idle_health_s(server: Server) -> float:
    """The median time of /health while the server is idle."""
    return statistics.median(ask_health(server.url, 100, 0.005, threading.Event()))


def others_are_served(server: Server, idle_s: float, seconds: float) -> None:
    """Check that /health has its usual median time and that completions are the same."""
    expected, took = greedy(server), []
    until = time.monotonic() + seconds
    health_s: list[float] = []
    while time.monotonic() < until:
        health_s += ask_health(server.url, 20, 0.01, threading.Event())
        began = time.monotonic()
        assert greedy(server) == expected
        took.append(time.monotonic() - began)
    busy_s = statistics.median(health_s)
    say(f"/health {idle_s * 1000:.2f} ms idle, {busy_s * 1000:.2f} ms meanwhile (medians)")
    say(f"completions at most {max(took) * 1000:.0f} ms")
    assert busy_s <= max(3 * idle_s, _LEAST_S)
    assert max(took) < 20


def all_is_freed(server: Server, descriptors: int) -> None:
    """Check that descriptors are as before, no page is held, and requests are served."""
    assert wait_for(lambda: num_descriptors(server.pid) <= descriptors), (
        f"{num_descriptors(server.pid)} descriptors, {descriptors} before"
    )
    gauges = wait_until_idle(server)
    assert not any(gauges.values()), gauges
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("sent", "first"),
    [(_HEAD, 1), (_BODY, _BODY.index(b'"a"'))],
    ids=["head", "body"],
)
def test_requests_that_come_byte_by_byte_delay_no_others(
    patient: Server, sent: bytes, first: int
) -> None:
    """Fifty slow requests come at once."""
    idle_s, descriptors, over = (
        idle_health_s(patient),
        num_descriptors(patient.pid),
        threading.Event(),
    )
    with opened(patient, _SLOW) as socks, ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip, socks, sent, first, over)
        try:
            others_are_served(patient, idle_s, _SLOW_S)
            assert num_descriptors(patient.pid) <= descriptors + _SLOW + 5
        finally:
            over.set()
        dripping.result()
    all_is_freed(patient, descriptors)


def test_connections_beyond_the_limit_get_503_until_there_is_room(patient: Server) -> None:
    """The limit is uvicorn's own. A connection without a request counts, too."""
    descriptors = num_descriptors(patient.pid)
    with opened(patient, _MOST_CONNECTIONS):
        time.sleep(1)  # all are accepted, on a loaded machine too
        assert httpx.get(f"{patient.url}/version").status_code == 503
    all_is_freed(patient, descriptors)


@pytest.mark.parametrize("kind", ["lists", "parts", "messages", "keys"])
def test_a_costly_body_does_not_hold_the_event_loop(server: Server, kind: str) -> None:
    """Each is as large as the limits allow; probes are answered meanwhile."""
    raw, over = COSTLY[kind](), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_health, server.url, 10**6, 0.005, over)
        time.sleep(0.5)  # the probes have begun
        (reply,) = exchange(address_of(server.url), raw, limit_s=60)
        over.set()
        health_s = asking.result()
    say(f"{kind}: {reply.status}, /health at most {max(health_s) * 1000:.0f} ms")
    assert reply.status == 400
    assert max(health_s) < 0.2


@pytest.mark.long
def test_unread_streams_delay_no_requests(patient: Server) -> None:
    """Sixty-four streams run, and the memory for their unread outputs is bounded."""
    idle_s, descriptors = idle_health_s(patient), num_descriptors(patient.pid)
    before_mib, finished = rss_mib(patient.pid), answered(patient)
    with opened(patient, _STREAMS, tiny=True) as socks:
        for sock in socks:
            sock.sendall(_STREAM)
        assert wait_for(lambda: value(patient, "requests_running") == _STREAMS)
        began = time.monotonic()
        assert httpx.get(f"{patient.url}/health", timeout=20).status_code == 200
        greedy(patient)
        say(f"a completion beside {_STREAMS} streams: {time.monotonic() - began:.2f} s")
        assert not any(wait_until_idle(patient, 90).values()), "the engine waits for a reader"
        blocked = _STREAMS + 1 - (answered(patient) - finished)  # one was the completion
        grown_mib = rss_mib(patient.pid) - before_mib
        say(f"{blocked} of {_STREAMS} streams are not taken; +{grown_mib:.0f} MiB")
        assert blocked > 0, "nothing was held back"
        assert grown_mib <= _MOST_GROWTH_MIB
        others_are_served(patient, idle_s, 1)
    all_is_freed(patient, descriptors)


def answered(server: Server) -> int:
    """The number of requests to /v1/completions that are over."""
    return sum(
        int(count)
        for (name, labels), count in samples(server).items()
        if name == "ropewalk_http_requests_total" and ("route", "/v1/completions") in labels
    )
