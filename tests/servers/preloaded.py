"""Commands of ours as forks of one process that has imported what a server imports.

An interpreter takes four seconds of processor time to import torch, transformers and the server,
and the tests start thirty servers. Tests of the start itself run a command of their own
(`tests.servers.processes.command`).
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from select import select
from typing import Any
from unittest.mock import patch

from ropewalk.server.process.hangups import end_process

_ROOT = Path(__file__).resolve().parents[2]
_LONGEST = 1 << 20  # bytes of a request: arguments and environment
_MOST_FILES = 16
# Modules that a server has imported by the time it listens, also those that a load imports late.
_MODULES = (
    "ropewalk.server.serve_command",
    "ropewalk.server.startup.app",
    "ropewalk.server.startup.load_service",
    "ropewalk.server.startup.lifecycle",
    "ropewalk.server.startup.planning.dry_run",
    "ropewalk.model_runtime.parallel.follower",
    "transformers.models.llama.modeling_llama",
    "uvicorn.protocols.http.h11_impl",
)


class Fork:
    """A running command, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # a pipe that says how it ended

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, or minus the signal that ended it."""
        if self.returncode is None:
            if not select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            told = os.read(self._status, 16)
            os.close(self._status)
            assert told, "the process that forks has ended"
            self.returncode = os.waitstatus_to_exitcode(int(told))
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Parent:
    """The process that forks; it ends with this one, or when it is closed."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(number)], pass_fds=[number], cwd=_ROOT
            )
        self.pid = self._process.pid

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        call: str | None = None,
    ) -> Fork:
        """Run `python -m module arguments` in this process's folder.

        Its environment is that of this process, with `env` added. `pass_fds` are as in
        `subprocess.Popen`. With `call`, the module is imported and this function of it called.
        """
        request = {
            "module": module,
            "call": call,
            "arguments": arguments,
            "environment": {**os.environ, **(env or {})},
            "folder": str(Path.cwd()),
            "files": [1, 2, *pass_fds],
        }
        told, tells = os.pipe()
        try:
            files = [tells, stdout, stderr, *pass_fds]
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        finally:
            os.close(tells)
        return Fork(int(self._socket.recv(16)), told)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait()


class Starter:
    """Stands for `Parent` where a process with torch cannot fork: each command is a new one."""

    pid = os.getpid()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        call: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run the command as `Parent.fork` does."""
        code = ["-m", module] if call is None else ["-c", f"import {module} as m; m.{call}()"]
        return subprocess.Popen(
            [sys.executable, *code, *arguments],
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            pass_fds=pass_fds,
        )

    def close(self) -> None:
        """Nothing has to end."""


@cache
def parent() -> Parent | Starter:
    """Return the one of this process."""
    return Parent() if sys.platform == "linux" else Starter()


def close() -> None:
    """End the one of this process, if it was needed."""
    if parent.cache_info().currsize:
        parent().close()
        parent.cache_clear()


def _import() -> None:
    from ropewalk.server.process.preflight import (  # before torch, as in a command
        bound_memory,
        wait_briefly,
    )

    bound_memory()
    wait_briefly()
    gc.disable()  # the imports make no garbage, and looking for it takes a second
    for name in _MODULES:
        importlib.import_module(name)
    _load_once()
    gc.freeze()
    gc.enable()


def _load_once() -> None:
    """Fill what libraries keep for the next load: patterns, compiled kernels, late imports.

    A fork then loads in a third of the processor time. A thread would not live on in a fork.
    """
    import torch

    from ropewalk.server.settings.load import load_settings
    from ropewalk.server.startup.load_service import load_service

    if torch.get_num_threads() > 1:
        return  # its threads would not be in a fork
    # Forks could not set their number if this process had.
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        patch.object(torch, "set_num_threads"),
    ):
        load_service(load_settings({}))
    gc.collect()
    assert threading.active_count() == 1


def _reap(statuses: dict[int, int]) -> None:
    """Tell how children ended."""
    while statuses:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # a signal within this handler has let it take the last one
            return
        if not pid:
            return
        os.write(statuses[pid], str(status).encode())
        os.close(statuses.pop(pid))


def _requests(connection: socket.socket) -> dict[str, Any]:
    """Fork at each request; return it in the child, and never in the parent."""
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(statuses))
    while True:
        message, received, _, _ = socket.recv_fds(connection, _LONGEST, _MOST_FILES)
        if not message:
            os._exit(0)
        tells, *files = received
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            for each in (tells, connection.detach(), *statuses.values()):
                os.close(each)
            request = dict(json.loads(message))
            _place(files, request["files"])
            return request
        statuses[pid] = tells
        for each in files:
            os.close(each)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        connection.send(str(pid).encode())


def _place(files: list[int], numbers: list[int]) -> None:
    """Give the files their numbers, which may be those that others of them have now."""
    safe = [fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in files]
    for each in files:
        os.close(each)
    for each, number in zip(safe, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # TMPDIR is read again
    os.chdir(request["folder"])
    sys.argv[:] = [request["module"], *request["arguments"]]
    code: object = None
    try:
        if request["call"] is None:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            getattr(importlib.import_module(request["module"]), request["call"])()
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    # To free what was imported would take half a second of processor time.
    end_process(code or 0)


if __name__ == "__main__":
    _import()
    _run(_requests(socket.socket(fileno=int(sys.argv[1]))))
