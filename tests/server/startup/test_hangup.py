"""SIGHUP while the model loads, and the end of the terminal that a server was started in."""

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import command
from tests.server.startup.test_lifecycle import process

pytestmark = pytest.mark.alone


def test_a_hangup_while_loading_is_kept(tmp_path: Path) -> None:
    """The settings are read again once the server runs, and no signal ends it."""
    with process(tmp_path) as started:
        started.process.send_signal(signal.SIGHUP)
        started.process.send_signal(signal.SIGHUP)
        started.wait_for("SIGHUP: the settings will be read again")
        started.wait_for("listening on")
        started.wait_for("event='reloaded'")
        assert started.get("/health").status_code == 200
        started.process.send_signal(signal.SIGHUP)
        assert started.get("/health").status_code == 200
        assert started.log().count("will be read again") == 1


@contextmanager
def in_a_terminal(log: Path) -> Iterator[tuple[int, int]]:
    """A server whose controlling terminal is ours: its process id, and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        target = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(target, 2)
        os.execv(sys.executable, command("serve", "--port", "0"))  # noqa: S606
    try:
        yield pid, terminal
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.mark.parametrize("until", ["loading; http", "listening on"])
def test_a_server_ends_with_its_terminal(tmp_path: Path, until: str) -> None:
    """It ends as on SIGTERM: with code 0, also while the model loads."""
    log = tmp_path / "log"
    with in_a_terminal(log) as (pid, terminal):
        deadline = time.monotonic() + 120
        while not log.exists() or until not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        os.kill(pid, signal.SIGHUP)  # the terminal is still there
        time.sleep(0.5)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.close(terminal)
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert "Traceback" not in log.read_text()
