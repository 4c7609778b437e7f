"""Answers while the model loads, and the change from them to the server."""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numba
import pytest

from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.gate import listening_socket
from ropewalk.server.startup.lifecycle import GracefulServer
from ropewalk.server.startup.loading_answers import LoadingAnswers
from ropewalk.server.startup.progress import LoadingProgress
from tests.servers.processes import command


@contextmanager
def answering() -> Iterator[tuple[LoadingProgress, int]]:
    """A server whose model never loads, by its progress and its port."""
    settings = load_settings({"port": "0", "max_connections": "64"})
    progress, has_started = LoadingProgress(), threading.Event()
    with listening_socket(settings) as listener:
        server = GracefulServer(settings, LoadingAnswers(settings, progress), has_started.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        assert has_started.wait(20)
        try:
            yield progress, listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


def ask(
    port: int, method: str = "GET", path: str = "/", body: bytes | None = None
) -> httpx.Response:
    """One request on a connection of its own."""
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", content=body, timeout=20)


def test_every_path_but_live_is_loading() -> None:
    """The envelope is OpenAI's, with the phase and its seconds."""
    with answering() as (progress, port):
        live = ask(port, path="/live")
        assert (live.status_code, live.json()) == (200, {"status": "loading"})
        progress.enter("loading weights")
        for method, path in (("GET", "/health?x=1"), ("POST", "/v1/completions")):
            answer = ask(port, method, path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            assert answer.headers["connection"] == "close"
            error = answer.json()["error"]
            assert error.pop("seconds") >= error.pop("phase_seconds") >= 0
            assert error == {
                "message": "The model is loading.",
                "type": "server_error",
                "param": None,
                "code": "loading",
                "phase": "loading weights",
            }
        assert ask(port, "HEAD").content == b""
        page = ask(port, path="/playground/")
        assert (page.status_code, page.content[:9]) == (200, b"<!doctype")
        assert ask(port, "HEAD", "/playground/").headers["etag"] == page.headers["etag"]


def test_kernels_are_named_while_they_are_compiled() -> None:
    """A kernel that needs others is named until all of them are compiled."""
    said: list[str] = []
    progress = LoadingProgress(said.append)
    progress.enter("checking the model")
    assert "kernel" not in progress.as_json()
    progress.compiling("attend")
    progress.compiling("read")
    progress.compiled()
    found = progress.as_json()
    assert (found["phase"], found["kernel"]) == ("compiling kernels", "attend")
    assert found["kernels_compiled"] == 1
    progress.compiled()
    found = progress.as_json()
    assert (found["phase"], found["kernels_compiled"]) == ("checking the model", 2)
    assert [line.partition(";")[0] for line in said] == [
        "compiling kernels for this processor",
        "compiling attend",
    ]


def test_only_the_seconds_of_the_compiler_count_as_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Imports before the first kernel, and what runs between two of them, are no compilation."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[str] = []
    progress = LoadingProgress(said.append)
    now += 8
    progress.compiling("trial")
    assert said[-1] == "compiling trial; 0 done, 0 s so far"
    now += 3
    found = progress.as_json()
    assert (found["seconds"], found["phase_seconds"]) == (11, 3)
    progress.compiled()
    now += 20
    progress.compiling("attend")
    now += 2
    progress.compiling("read")
    assert said[-1] == "compiling read; 1 done, 5 s so far"


def test_only_our_kernels_are_counted() -> None:
    """numba compiles helpers of its own for them, and other packages may use numba."""
    progress = LoadingProgress()
    progress.watch_compiler()
    foreign, own = (numba.njit(lambda x: x) for _ in range(2))
    own.py_func.__module__ = "ropewalk.model_runtime.cpu_kernels.attention.attention"
    foreign(1)
    assert "kernels_compiled" not in progress.as_json()
    own(1)
    own(1.0)
    assert progress.as_json()["kernels_compiled"] == 2


def test_a_large_body_is_read_away() -> None:
    """A connection that is closed with unread bytes would be reset before the answer is read."""
    with answering() as (_, port):
        answer = ask(port, "POST", "/v1/completions", b"x" * 4_000_000)
        assert answer.status_code == 503


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", b"\x00\xff\r\n\r\n", b"x" * 200_000])
def test_a_connection_without_a_request_delays_no_other(sent: bytes) -> None:
    """Other clients are answered meanwhile."""
    with (
        answering() as (_, port),
        socket.create_connection(("127.0.0.1", port), timeout=20) as odd,
    ):
        odd.sendall(sent)
        assert ask(port).status_code == 503


def test_the_first_answer_comes_before_the_imports(tmp_path: Path) -> None:
    """The phase of the first answer is the import, and a port in use is one sentence."""
    with listening_socket(load_settings({"port": "0"})) as free:
        port = free.getsockname()[1]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command("serve", "--port", str(port)), stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = ask(port, path="/health")
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert answer.json()["error"]["phase"] == "importing"
        second = subprocess.run(
            command("serve", "--port", str(port)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert second.returncode == 2
        assert second.stderr == (
            f"ropewalk: cannot listen on host 127.0.0.1, port {port}: Address already in use\n"
        )
    finally:
        process.kill()
        process.wait()
        log.close()
