"""A whole process whose engine dies or stalls, as its clients and its probes see it."""

import os
import time
from pathlib import Path

import httpx
import pytest

from tests.server.fuzz.attack import wait_until_idle
from tests.server.fuzz.breakable import AUTHORIZED, DIE, MODULE, STALL
from tests.server.load.soak_watch import wait_for
from tests.server.startup.test_lifecycle import ENDLESS, LONG, process, stream, wait_until_streaming
from tests.servers.processes import Server

_BUSY = {"prompt": [7] * 20, "max_tokens": 2000, "ignore_eos": True, "n": 4, "stream": True}
_BUSY_S = 2.0  # twice what a step may take in that server


def status(url: str, path: str) -> int:
    """The status of a GET request."""
    return httpx.get(url + path, timeout=20).status_code


def test_a_dead_engine_ends_the_process_with_code_1(tmp_path: Path) -> None:
    """Streams end with an error event, and requests and probes get 503."""
    with process(tmp_path, module=MODULE) as started:
        started.wait_for("listening on")
        lines: list[str] = []
        reading = stream(started.url, ENDLESS, lines)
        wait_until_streaming(lines)
        assert status(started.url, "/health") == 200
        started.process.send_signal(DIE)
        started.wait_for("engine_died")
        refused = httpx.post(f"{started.url}/v1/completions", json=LONG, timeout=20)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_stopped"
        assert refused.headers["retry-after"] == "5"
        for path in ("/health", "/ready", "/live"):
            answer = started.get(path)
            assert (answer.status_code, answer.json()["error"]["message"]) == (
                503,
                "The engine is not running.",
            )
        assert status(started.url, "/metrics") == 200
        assert started.process.wait(30) == 1
        reading.join(60)
        assert lines[-1] == "data: [DONE]"
        assert "The request failed: the engine stopped." in lines[-2]
        log = (tmp_path / "log").read_text()
        assert log.count("Traceback") == 1, "the engine's own"


@pytest.mark.alone
@pytest.mark.long
def test_a_stalled_engine_is_not_live_and_a_busy_one_is(breakable: Server) -> None:
    """The stall is longer than a step may take; when it ends, the process is live again."""
    url = breakable.url
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=_BUSY, headers=AUTHORIZED, timeout=90
    ) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        began, busy = time.monotonic(), []
        while time.monotonic() - began < _BUSY_S:
            assert '"error"' not in next(events)
            busy.append(status(url, "/live"))
        assert set(busy) == {200}
        os.kill(breakable.pid, STALL)
        try:
            assert wait_for(lambda: status(url, "/live") == 503)
            told = httpx.get(f"{url}/live", timeout=20).json()["error"]["message"]
            assert "The engine has made no step for " in told
            assert status(url, "/ready") == status(url, "/health") == 503
        finally:
            os.kill(breakable.pid, STALL)
        assert wait_for(lambda: status(url, "/live") == 200)
        # Far more than what was under way: what ran was not given up.
        assert not [line for line, _ in zip(events, range(500), strict=False) if '"error"' in line]
    assert not any(wait_until_idle(breakable).values())
