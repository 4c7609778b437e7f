"""Ten kills a minute under 48 streams: nothing is lost, and no text changes.

    ROUTER_KILL_SECONDS=600 python -m pytest tests/server/router/test_kills.py -n 0

ROUTER_KILL_SECONDS is its length; it runs in `make test-full`. With
ROUTER_KILL_OUT it writes what it counted to that file.
"""

import http.client
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.router.restarted import Restarted, restarted
from tests.server.router.test_route import (
    FLAGS,
    KEY,
    PATHS,
    alone,
    body_for,
    events,
    metric,
    routed,
)
from tests.servers.processes import without_replicas

pytestmark = without_replicas

SECONDS = float(os.environ.get("ROUTER_KILL_SECONDS", "60"))
OUT = os.environ.get("ROUTER_KILL_OUT")
_EVERY_S = 6.0
_NUM_STREAMS, _NUM_SERVERS = 48, 3
_FLAGS = (
    *("--router-key", KEY, "--check-seconds", "0.2", "--silence-seconds", "10"),
    *("--wait-seconds", "120", "--continue-attempts", "100"),  # a stream may meet every kill
)


def streamed(url: str, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events of one stream, read whole by the standard library's client."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=240)
    try:
        head = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), head)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return events(content)
    finally:
        connection.close()


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
            assert streamed(url, *asked[turn]) == expected[turn]
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
        if OUT is not None:
            told = {"seconds": SECONDS, "kills": num_kills, "streams": num_whole, **outcomes}
            Path(OUT).write_text(json.dumps(told), encoding="utf-8")
        assert num_kills
        assert num_whole >= _NUM_STREAMS
        assert outcomes["ok"] > 0
        assert outcomes["diverged"] == outcomes["given_up"] == 0
