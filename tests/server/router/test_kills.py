"""Servers that are killed or replaced under streams: nothing is lost, and no text changes.

There are ten kills a minute under 48 streams.

    ROUTER_KILL_SECONDS=600 python -m pytest tests/server/router/test_kills.py -n 0

ROUTER_KILL_SECONDS is its length; it runs in `make test-full`.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.server.router.restarted import Restarted, restarted
from tests.server.router.test_route import (
    FLAGS,
    KEY,
    PATHS,
    ROUTER,
    alone,
    body_for,
    events,
    metric,
    routed,
)
from tests.servers.processes import without_replicas

pytestmark = without_replicas

SECONDS = float(os.environ.get("ROUTER_KILL_SECONDS", "60"))
_EVERY_S = 6.0
_NUM_STREAMS, _NUM_SERVERS = 48, 3
_FLAGS = (
    *("--router-key", KEY, "--check-seconds", "0.2", "--silence-seconds", "10"),
    *("--wait-seconds", "120", "--continue-attempts", "100"),  # a stream may meet every kill
)


def kill_in_turns(servers: list[Restarted], is_over: threading.Event) -> int:
    """Kill one server after the other and start it again, on a fixed beat; return the kills."""
    num_kills, due = 0, time.monotonic() + _EVERY_S / 2
    while not is_over.wait(max(0.0, due - time.monotonic())):
        victim = servers[num_kills % len(servers)]
        victim.end()
        victim.start()
        num_kills += 1
        due += _EVERY_S
    return num_kills


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 300)
def test_no_stream_is_lost_while_servers_are_killed() -> None:
    """Every stream has all events of a server that nobody kills."""
    asked = [(path, body_for(path, number, 200)) for number in range(3) for path in PATHS]
    is_over = threading.Event()

    def run(at: int, url: str) -> int:
        """Ask one stream after the other; return how many were whole."""
        num_whole = 0
        while not is_over.is_set():
            turn = (at + num_whole) % len(asked)
            path, body = asked[turn]
            answer = httpx.post(url + path, json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            assert events(answer.content) == expected[turn]
            num_whole += 1
        return num_whole

    with restarted(_NUM_SERVERS, *FLAGS) as servers:
        expected = alone(servers[0].server, asked)
        urls = [each.url for each in servers]
        with (
            routed(*urls, flags=_FLAGS, num_ready=_NUM_SERVERS) as url,
            ThreadPoolExecutor(_NUM_STREAMS + 1) as pool,
        ):
            killing = pool.submit(kill_in_turns, servers, is_over)
            streams = [pool.submit(run, at, url) for at in range(_NUM_STREAMS)]
            is_over.wait(SECONDS)
            is_over.set()
            num_kills, num_whole = killing.result(), sum(each.result() for each in streams)
            outcomes = {
                each: metric(url, f'continued_total{{outcome="{each}"}}')
                for each in ("ok", "diverged", "given_up")
            }
        assert num_kills
        assert num_whole >= _NUM_STREAMS
        assert outcomes["ok"] > 0
        assert outcomes["diverged"] == outcomes["given_up"] == 0


@pytest.mark.long
def test_a_newer_version_replaces_servers_while_streams_run() -> None:
    """One server after another ends by SIGTERM and begins with another fingerprint."""
    # It decides other answers' bytes than those of this test.
    newer = ("--reasoning", "inline")
    is_over = threading.Event()
    asked = [(path, body_for(path, number, 400)) for number in range(2) for path in PATHS]

    def stream(url: str, request: tuple[str, dict[str, Any]]) -> list[list[bytes]]:
        """The events of one stream after the other, until the servers are replaced."""
        found = []
        while not is_over.is_set():
            answer = httpx.post(url + request[0], json=request[1], timeout=120)
            assert answer.status_code == 200, answer.text
            found.append(events(answer.content))
        return found

    with restarted(3, *FLAGS) as servers:
        expected = alone(servers[0].server, asked)
        urls = [each.url for each in servers]
        with (
            routed(*urls, flags=(*ROUTER, "--routing", "least_loaded"), num_ready=3) as url,
            ThreadPoolExecutor(len(asked)) as pool,
        ):
            streams = [pool.submit(stream, url, each) for each in asked]
            try:
                for number, each in enumerate(servers, 1):
                    each.end(signal.SIGTERM)
                    each.start(*newer)
                    num_ready = 2 if number < 3 else 3
                    refused = 1 if number < 3 else 0
                    wait_until(lambda num=num_ready: metric(url, 'servers{state="ready"}') == num)
                    name = 'refused_servers{reason="fingerprint"}'
                    wait_until(lambda num=refused, name=name: metric(url, name) == num)
            finally:
                is_over.set()
            for each, wanted in zip(streams, expected, strict=True):
                found = each.result()
                assert found
                assert all(one == wanted for one in found)
            assert metric(url, 'continued_total{outcome="diverged"}') == 0
            assert metric(url, 'continued_total{outcome="given_up"}') == 0
