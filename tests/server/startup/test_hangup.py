"""SIGHUP while the model loads, and the end of the terminal that a server was started in."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.startup.test_lifecycle import process
from tests.servers.processes import command


@pytest.mark.long
def test_a_hangup_while_loading_is_kept(tmp_path: Path) -> None:
    """The settings are read again once the server runs, and no signal ends it."""
    with process(tmp_path, loads_slowly=True) as started:
        started.process.send_signal(signal.SIGHUP)
        started.process.send_signal(signal.SIGHUP)
        started.wait_for("SIGHUP: the settings will be read again")
        started.wait_for("listening on")
        started.wait_for("event=reloaded")
        assert started.get("/health").status_code == 200
        started.process.send_signal(signal.SIGHUP)
        assert started.get("/health").status_code == 200
        assert started.log().count("will be read again") == 1


@pytest.mark.long
def test_a_hangup_before_the_command_is_imported_is_kept(tmp_path: Path) -> None:
    """The process blocks the signal at its first lines, and gets it when it can handle it."""
    log = tmp_path / "log"
    with log.open("w") as stderr:
        started = subprocess.Popen(command("serve", "--port", "0"), stderr=stderr)
    try:
        deadline = time.monotonic() + 120

        def wait_until(holds: Callable[[], bool]) -> None:
            while not holds():
                assert started.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()

        status = Path(f"/proc/{started.pid}/status")
        wait_until(lambda: _blocks_hangups(status.read_text()))
        assert not log.read_text()
        started.send_signal(signal.SIGHUP)
        wait_until(lambda: "event=reloaded" in log.read_text())
        assert not _blocks_hangups(status.read_text())
        text = log.read_text()
        assert text.index("SIGHUP: the settings will be read") < text.index("listening on")
    finally:
        started.kill()
        started.wait()


def _blocks_hangups(status: str) -> bool:
    """Whether a process blocks SIGHUP, by its /proc/PID/status."""
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask.split()[1], 16) >> (signal.SIGHUP - 1) & 1)


@contextmanager
def in_a_terminal(log: Path) -> Iterator[tuple[int, int]]:
    """A server whose controlling terminal is ours: its process id, and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
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


@pytest.mark.long
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


_INTERRUPTED = """
import io, signal, sys, threading
from ropewalk.server.process.hangups import Hangups, end_at_once

class Interrupted(io.RawIOBase):
    writable = lambda self: True
    def write(self, data):
        if not said or not said.pop():
            return len(data)
        signal.raise_signal(signal.{name})
        print("went on")
        return len(data)

said = [False, False, True]
hangups = Hangups(lambda line: print(line, file=sys.stderr, flush=True))
signal.signal(signal.SIGTERM, end_at_once)
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
print("a line of the log", file=sys.stderr, flush=True)
for each in threading.enumerate()[1:]:
    each.join()  # an interpreter that ends while a thread writes is aborted
print("the end")
"""


@pytest.mark.parametrize(("name", "said"), [("SIGTERM", ""), ("SIGHUP", "went on\nthe end\n")])
def test_a_signal_in_the_middle_of_a_write_to_standard_error(name: str, said: str) -> None:
    """The stream refuses another write then. SIGTERM ends the process, and SIGHUP is kept."""
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED.replace("{name}", name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, said)


_IN_A_LINE = """
import signal, sys, time
import structlog
from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.process.hangups import Hangups

class Stream:
    written = ""
    def write(self, text):
        if not self.written:
            self.written = "a line"
            signal.raise_signal(signal.SIGHUP)
        self.written += text
    def flush(self): pass
    def isatty(self): return False

sys.stderr = stream = Stream()
log_to_stderr("json")
log = structlog.get_logger()
hangups = Hangups(log.info)
log.info("loading")
while "SIGHUP" not in stream.written:
    time.sleep(0.01)
print("told")
"""


def test_a_hangup_in_the_middle_of_a_line_of_the_log_is_told_behind_it() -> None:
    """The line has a lock, which the handler of the signal must not wait for."""
    ended = subprocess.run(
        [sys.executable, "-c", _IN_A_LINE], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.stdout == "told\n", ended.stderr


def test_a_process_without_standard_files_ends_with_its_code() -> None:
    """Both were closed at its start."""
    code = "from ropewalk.server.process.hangups import end_process; end_process(3)"
    run = ["/bin/sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(run, check=False).returncode == 3
