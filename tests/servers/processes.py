"""`ropewalk serve` as a process of its own: started on a free port, always ended."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from ropewalk.cli import ropewalk
from ropewalk.studies.doctor.packages import read_torch
from tests.servers import preloaded
from tests.servers.preloaded import Fork

_START_S = 120
_STOP_S = 90  # a Ray cluster on a loaded machine needs a minute
_read_torch = cache(read_torch)
_LISTENING = re.compile(r'(?:listening on\s+|"url": ")(https?://[^\s"]+)')  # text, or JSON
# With it every server of the tests has this many replicas on Ray Serve (make test-ray).
REPLICAS = os.environ.get("TEST_REPLICAS")
# For slow tests, or with a server of their own: replicas take half a minute to start.
without_replicas = pytest.mark.skipif(
    REPLICAS is not None, reason="slow, and tests of the same routes run with replicas"
)


@dataclass(frozen=True)
class Server:
    """A server that is listening."""

    url: str
    banner: str
    pid: int
    log: list[str]  # what it says on stderr, line by line, as it goes on


def command(*arguments: str, module: str = "ropewalk") -> list[str]:
    """The command line in this interpreter; `module` replaces the server."""
    return [sys.executable, "-m", module, *arguments]


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself in this process, which saves the time of its imports."""
    # The process that imports torch for `doctor` runs once for all tests.
    with patch("ropewalk.studies.doctor.command.read_torch", _read_torch):
        result = CliRunner().invoke(ropewalk, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def run_to_end(
    *arguments: str, env: dict[str, str] | None = None, module: str = "ropewalk"
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself in a process of its own.

    It is a fork (`tests.servers.preloaded`), unless a variable is set that a library reads when it
    is imported.
    """
    env = env or {}
    if not all(name.startswith("ROPEWALK_") for name in env):
        return subprocess.run(
            command(*arguments, module=module),
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
            env={**os.environ, **env},
        )
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        fork = preloaded.parent().fork(
            module, arguments, stdout=stdout.fileno(), stderr=stderr.fileno(), env=env
        )
        try:
            code = fork.wait(_START_S)
        finally:
            fork.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def children_of(pid: int, module: str) -> list[int]:
    """The processes that a process has started for a module of ours."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            arguments = stat.with_name("cmdline").read_text().split("\0")
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and module in arguments:
            found.append(int(stat.parent.name))
    return found


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return _mib(pid, "VmRSS")


def peak_mib(pid: int) -> float:
    """The largest resident memory that the process ever had."""
    return _mib(pid, "VmHWM")


def _mib(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def num_descriptors(pid: int) -> int:
    """Open files and sockets of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def end(process: Popen[Any] | Fork, seconds: float = _STOP_S) -> None:
    """Ask a process to end, and kill it if it has not after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start(
    arguments: Sequence[str], module: str, stderr: int, subcommand: str
) -> Popen[bytes] | Fork:
    """Start `serve` or `route`. Ray starts processes that need an interpreter of their own."""
    flags = (subcommand, "--port", "0", *arguments)
    if "--replicas" in flags:
        return Popen(command(*flags, module=module), stderr=stderr)
    return preloaded.parent().fork(module, flags, stdout=1, stderr=stderr)


@contextmanager
def running_server(
    *arguments: str, module: str = "ropewalk", subcommand: str = "serve"
) -> Iterator[Server]:
    """Serve until the block ends; the start is a fork (`tests.servers.preloaded`)."""
    if REPLICAS is not None and module == "ropewalk" and subcommand == "serve":
        arguments = ("--replicas", REPLICAS, *arguments)
    reads, writes = os.pipe()
    try:
        process = _start(arguments, module, writes, subcommand)
    finally:
        os.close(writes)
    lines: list[str] = []
    reader = None
    deadline = time.monotonic() + _START_S
    stderr = open(reads)  # noqa: PTH123, SIM115  # a file descriptor, closed below
    try:
        for line in stderr:
            lines.append(line)
            found = _LISTENING.search(line)
            if found or time.monotonic() > deadline:
                break
        assert found, "".join(lines)
        banner = "".join(lines)
        # Read on, or the pipe is full after a thousand warnings and the server waits for us.
        reader = threading.Thread(target=lines.extend, args=(stderr,))
        reader.start()
        yield Server(found[1], banner, process.pid, lines)
    finally:
        end(process)
        if reader is not None:
            reader.join()
        stderr.close()
