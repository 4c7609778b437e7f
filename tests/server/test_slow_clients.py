"""Clients that are slow on purpose do not delay others, and everything is freed afterwards."""

import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from socket import AF_INET, IPPROTO_TCP, SO_RCVBUF, SOCK_STREAM, SOL_SOCKET, TCP_MAXSEG, socket

import httpx
import pytest

from server.settings.load import ServeSettings
from tests.processes import Server, running_server
from tests.progress import say
from tests.server.attack import ask_health, greedy, wait_until_idle
from tests.server.raw_http import address_of, request
from tests.server.soak_watch import num_descriptors, rss_mib, wait_for
from tests.server.test_metrics import samples, value

pytestmark = pytest.mark.alone

_SLOW = 50  # clients that send a byte now and then
_SLOW_S = float(os.environ.get("SLOW_SECONDS", "2"))  # for so long
_STREAMS = 64  # that no client reads
_LEAST_S = 0.005  # three times the idle median, but no less than this: two shared cores
_MOST_GROWTH_MIB = 150
# Short times, so that the test need not wait long.
_LIMITS = {
    "max_connections": 200,
    "head_timeout_seconds": 1.5,
    "body_timeout_seconds": 1.5,
    "send_timeout_seconds": 1.5,
    "max_unread_tokens": 32,
}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaa"
_BODY = request(b'{"prompt": "a"' + b" " * 200 + b"}")
_STREAM = request(
    b'{"prompt": "a", "max_tokens": 150, "ignore_eos": true, "stream": true, "logprobs": 20}'
)
_PIPELINED = request(b"", "/openapi.json", method="GET", headers=(), close=False) * 40


def has(setting: str) -> bool:
    """Whether the server has this limit."""
    return setting in ServeSettings.model_fields


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """A server with room for all the streams at once."""
    flags = [f"--{name.replace('_', '-')}={given}" for name, given in _LIMITS.items() if has(name)]
    with running_server("--max-num-seqs", str(_STREAMS), *flags) as running:
        greedy(running)
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


def is_closed(sock: socket) -> bool:
    """Whether the server has closed the connection, with or without an answer."""
    sock.settimeout(0.001)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


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
    ("sent", "first", "limit"),
    [(_HEAD, 1, "head_timeout_seconds"), (_BODY, _BODY.index(b'"a"'), "body_timeout_seconds")],
    ids=["head", "body"],
)
def test_requests_that_come_byte_by_byte_delay_no_others(
    patient: Server, sent: bytes, first: int, limit: str
) -> None:
    """Fifty slow requests come at once; a server with a limit closes them itself."""
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
            if has(limit):
                assert wait_for(lambda: all(is_closed(sock) for sock in socks), _LIMITS[limit] + 5)
                all_is_freed(patient, descriptors)
        finally:
            over.set()
        dripping.result()
    all_is_freed(patient, descriptors)


def test_more_idle_connections_than_allowed_delay_no_requests(patient: Server) -> None:
    """Open descriptors stay below the cap, if there is one."""
    idle_s, descriptors = idle_health_s(patient), num_descriptors(patient.pid)
    most = _LIMITS["max_connections"]
    with opened(patient, most + 100) as socks:
        for sock in socks[: most // 2]:
            with suppress(OSError):  # one that was closed to make room
                sock.sendall(
                    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
                )  # and then kept open
        others_are_served(patient, idle_s, 2)
        if has("max_connections"):
            assert num_descriptors(patient.pid) <= descriptors + most + 5
    all_is_freed(patient, descriptors)


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
        assert blocked > 0 or has("max_unread_tokens"), "nothing was held back"
        assert grown_mib <= _MOST_GROWTH_MIB
        others_are_served(patient, idle_s, 1)
    all_is_freed(patient, descriptors)


@pytest.mark.parametrize(
    "raw", [_STREAM, _PIPELINED], ids=["a stream", "whole answers, one after another"]
)
def test_a_client_that_takes_nothing_is_disconnected(patient: Server, raw: bytes) -> None:
    """A thousand clients that take nothing would hold every connection for ever."""
    descriptors = num_descriptors(patient.pid)
    limit_s = _LIMITS["send_timeout_seconds"] + 7
    try:
        with opened(patient, 8, tiny=True) as socks:
            for sock in socks:
                sock.sendall(raw)
            assert wait_for(lambda: num_descriptors(patient.pid) == descriptors + 8)
            assert wait_for(lambda: num_descriptors(patient.pid) <= descriptors, limit_s)
    finally:
        assert wait_for(lambda: num_descriptors(patient.pid) <= descriptors)


def answered(server: Server) -> int:
    """The number of requests to /v1/completions that are over."""
    return sum(
        int(count)
        for (name, labels), count in samples(server).items()
        if name == "ropewalk_http_requests_total" and ("route", "/v1/completions") in labels
    )
