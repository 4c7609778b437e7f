"""The life of a process: loading, draining, ending."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.servers import preloaded
from tests.servers.paced import MODULE, slowed
from tests.servers.preloaded import Fork
from tests.servers.processes import command

# Random tokens, because drafts would answer repeated ones within a few probes.
LONG = {"prompt": [7] * 20, "max_tokens": 100, "ignore_eos": True, "temperature": 2, "seed": 1}
ENDLESS = {"prompt": [7] * 20, "max_tokens": 2000, "ignore_eos": True, "n": 16}


class Process:
    """A server process and its log; the constructor waits only for its address."""

    def __init__(self, log: Path, *arguments: str, module: str, loads_slowly: bool) -> None:
        self._log = log
        self._stderr = log.open("w")
        flags = ("serve", "--port", "0", *arguments)
        self.process: subprocess.Popen[bytes] | Fork
        if loads_slowly:
            self.process = subprocess.Popen(command(*flags, module=module), stderr=self._stderr)
        else:
            fork = preloaded.parent().fork
            self.process = fork(module, flags, stdout=1, stderr=self._stderr.fileno())
        self.url = self.wait_for(r"loading; (http\S+) ")[1]

    def wait_for(self, pattern: str, limit_s: float = 120) -> re.Match[str]:
        """Wait for a line of its log that matches."""
        deadline = time.monotonic() + limit_s
        while not (found := re.search(pattern, self._log.read_text())):
            assert time.monotonic() < deadline, self._log.read_text()
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.02)
        return found

    def log(self) -> str:
        """Return its log so far."""
        return self._log.read_text()

    def end(self) -> None:
        """Kill the process, whatever its state is."""
        self.process.kill()
        self.process.wait()
        self._stderr.close()

    def get(self, path: str) -> httpx.Response:
        """The port is bound before it listens, so the first try may be too early."""
        for _ in range(200):
            try:
                return httpx.get(self.url + path, timeout=20)
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError("it does not listen")


@contextmanager
def process(
    tmp_path: Path, *arguments: str, module: str = "ropewalk", loads_slowly: bool = False
) -> Iterator[Process]:
    """A server process that is always ended; a test of the load has all imports in it."""
    made = Process(tmp_path / "log", *arguments, module=module, loads_slowly=loads_slowly)
    try:
        yield made
    finally:
        made.end()


def stream(url: str, body: dict[str, object], into: list[str]) -> threading.Thread:
    """Reads a stream in a thread; an error of the transport becomes its last line."""

    def read() -> None:
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=90
            ) as answer:
                into.extend(line for line in answer.iter_lines() if line)
        except httpx.TransportError as error:
            into.append(repr(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@contextmanager
def asking(port: int) -> Iterator[tuple[list[int], list[OSError]]]:
    """Clients that connect and ask again and again; the statuses and errors that they see."""
    seen: list[int] = []
    failed: list[OSError] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.005):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.request("GET", "/health")
                seen.append(connection.getresponse().status)
            except OSError as error:
                failed.append(error)
            finally:
                connection.close()

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for each in clients:
        each.start()
    try:
        yield seen, failed
    finally:
        is_over.set()
        for each in clients:
            each.join(30)


def wait_until_streaming(into: list[str]) -> None:
    """Wait until the first tokens have arrived."""
    wait_until(lambda: len(into) >= 5)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_at_once(tmp_path: Path, sig: signal.Signals) -> None:
    """A signal while loading gives exit code 0, without a traceback."""
    with process(tmp_path, loads_slowly=True) as started:
        started.get("/live")
        started.process.send_signal(sig)
        assert started.process.wait(20) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_on_a_signal_running_requests_finish_and_new_ones_are_refused(tmp_path: Path) -> None:
    """New requests get 503 after a signal, and the exit code is 0. Signals at once are one."""
    with process(tmp_path, module=MODULE) as started:
        started.wait_for("listening on")
        lines: list[str] = []
        with slowed(started.process.pid):
            reading = stream(started.url, LONG, lines)
            wait_until_streaming(lines)
            # As timeout(1) and a terminal do.
            for each in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                started.process.send_signal(each)
            started.wait_for("event=shutdown")
            refused = httpx.post(f"{started.url}/v1/completions", json=LONG, timeout=20)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
            assert started.get("/live").status_code == 200
            assert started.get("/ready").status_code == 503
            assert started.get("/metrics").status_code == 200
        reading.join(90)
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert started.process.wait(30) == 0


@pytest.mark.alone
@pytest.mark.long
def test_an_idle_server_ends_soon_and_says_so(tmp_path: Path) -> None:
    """A client's open connection does not delay the end. Measured: 0.3 s, 1.7 to 2.2 s before."""
    with process(tmp_path) as started, httpx.Client(base_url=started.url) as client:
        started.wait_for("listening on")
        assert client.get("/ready").status_code == 200
        began = time.monotonic()
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(30) == 0
        assert time.monotonic() - began < 1.5
        log = (tmp_path / "log").read_text()
        assert re.search(r"event=shutdown signal=SIGTERM running=0 limit_s=30.0\n", log)
        assert re.search(r"event=ended after_s=0\.\d+ unfinished=0\n$", log)


@pytest.mark.long
def test_a_stream_that_does_not_finish_in_time_ends_with_an_error_event(tmp_path: Path) -> None:
    """A process that ends streams with an error event still exits with code 0."""
    with process(tmp_path, "--shutdown-timeout-seconds", "0.5") as started:
        started.wait_for("listening on")
        lines: list[str] = []
        reading = stream(started.url, ENDLESS, lines)
        wait_until_streaming(lines)
        started.process.send_signal(signal.SIGTERM)
        reading.join(60)
        assert started.process.wait(60) == 0
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_stopped"


def num_open(url: str) -> int:
    """The answers that run or wait."""
    stats = httpx.get(f"{url}/stats", timeout=20).json()
    return int(stats["requests_running"] + stats["requests_waiting"])


@pytest.mark.long
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """A stream and a whole answer are still running. The exit code is 1, without a traceback."""
    statuses: list[int] = []

    def whole(url: str) -> None:
        answer = httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=60)
        statuses.append(answer.status_code)
        assert answer.json()["error"]["code"] == "draining"

    with process(tmp_path) as started:
        started.wait_for("listening on")
        lines: list[str] = []
        reading = stream(started.url, ENDLESS, lines)
        wait_until_streaming(lines)
        waiting = threading.Thread(target=whole, args=(started.url,))
        num_before = num_open(started.url)
        waiting.start()
        wait_until(lambda: num_open(started.url) > num_before)
        started.process.send_signal(signal.SIGTERM)
        started.wait_for("event=shutdown")
        time.sleep(1.2)  # a signal within a second would be the same one
        assert started.process.poll() is None
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(60) == 1
        reading.join(60)
        waiting.join(60)
        assert statuses == [503]
        assert "Traceback" not in started.log()
        assert "library_message" not in started.log()
        assert " unfinished=2\n" in started.log()
        requests = [line for line in started.log().splitlines() if "event=request " in line]
        assert all("aborted=true" in line for line in requests)
        assert sorted(re.findall(r" status=(\d+)", "".join(requests))) == ["200", "503"]


@pytest.mark.parametrize("arguments", [("route", "http://127.0.0.1:9"), ("serve",)])
def test_a_log_that_nobody_reads_ends_nothing(arguments: tuple[str, ...]) -> None:
    """The reader of standard error has left. Requests are answered, and a signal ends it."""
    reads, writes = os.pipe()
    started = preloaded.parent().fork(
        "ropewalk", (*arguments, "--port", "0"), stdout=writes, stderr=writes
    )
    os.close(writes)
    try:
        with open(reads) as log:  # noqa: PTH123  # a file descriptor
            found = re.search(r"listening on +(http\S+)", "".join(iter_to(log, "listening on")))
        assert found
        if arguments == ("serve",):
            body = {"prompt": "import", "max_tokens": 2}
            for _ in range(2):
                answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60)
                assert answer.status_code == 200
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0
    finally:
        started.kill()


def iter_to(lines: Iterable[str], text: str) -> Iterator[str]:
    """Lines up to the first one with a text."""
    for line in lines:
        yield line
        if text in line:
            return
