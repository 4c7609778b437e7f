"""The processes that compile and render chat templates, for the server's side.

A process is kept warm, because starting one takes 60 ms and a rendering a fraction of one. If all
are at work for a while, another one is started, up to a number. A template that exceeds its limits
costs the chat that met it only: its process ends, and a new one takes its place.
"""

import atexit
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

from pydantic_core import to_json

from ropewalk.model_runtime.child_process import bare_environment, command_of
from ropewalk.model_runtime.text.template_process import (
    DONE,
    ENCODING,
    LENGTH,
    REFUSED,
    TOO_LONG,
    TOO_MUCH_MEMORY,
    max_bytes,
    max_characters,
)

DEFAULT_SECONDS = 2.0  # of processor time; an ordinary chat takes less than a thousandth of it
_NUM_PROCESSES = 8  # at once; further chats wait
_NUM_WARM = 2  # kept when there is nothing to do, about 20 MiB each
# For an idle process before another one is started. Starting one takes longer than most renderings.
_PATIENCE_S = 0.05
_END_S = 2.0  # for a process that has closed its end
_SLOWEST = 10  # seconds of the clock for one of processor time, on a machine with much else to do


class TemplateProblemError(Exception):
    """A template refuses its messages, or fails on them; the text is a part of a sentence."""


class TemplateRefusedError(TemplateProblemError):
    """The template's own words, or Jinja's, about a template or its messages."""


class TemplateExcessError(TemplateProblemError):
    """A template exceeds a limit, `takes more than ...`."""


class _ProcessLostError(TemplateExcessError):
    """A process ended before it had read what it was asked, so no template is the cause."""


class _TemplateProcess:
    """One process. Only one thread at a time may use it."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        self.template: str | None = None  # the one that it has compiled
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603  # our own module, this interpreter
                    command_of("ropewalk.model_runtime.text.template_process"),
                    env=bare_environment(),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, asked: Mapping[str, Any], seconds: float) -> str:
        """Return the text of an answer. Raises TemplateProblemError.

        The process may be over after a TemplateExcessError.
        """
        content = _packed({**asked, "seconds": seconds})
        try:
            answer = self._exchange(content, time.monotonic() + _SLOWEST * (seconds + 1))
        except (BrokenPipeError, ConnectionResetError) as error:  # not of an end after the frame
            raise _ProcessLostError(self._excess(error, seconds)) from error
        except OSError as error:
            raise TemplateExcessError(self._excess(error, seconds)) from error
        kind, text = answer[:1], answer[1:].decode(*ENCODING)
        if kind == DONE:
            return text
        if kind == TOO_LONG:
            most = max_characters(len(content))
            raise TemplateExcessError(f"writes more than {most:,} characters")
        if kind == TOO_MUCH_MEMORY:
            self.end()
            most = max_bytes(len(content)) // 2**20
            raise TemplateExcessError(f"takes more than {most:,} MiB of memory")
        raise (TemplateRefusedError if kind == REFUSED else TemplateProblemError)(text)

    def _exchange(self, content: bytes, end: float) -> bytes:
        """Send a frame and return the content of the answer's. Raises OSError."""
        self._socket.settimeout(_left(end))
        self._socket.sendall(LENGTH.pack(len(content)) + content)
        (length,) = LENGTH.unpack(self._receive(LENGTH.size, end))
        if length > 1 + 4 * max_characters(len(content)):
            raise OSError("a longer answer than there may be")
        return self._receive(length, end)

    def _receive(self, length: int, end: float) -> bytes:
        received = bytearray(length)
        view, at = memoryview(received), 0
        while at < length:
            self._socket.settimeout(_left(end))
            num_bytes = self._socket.recv_into(view[at:])
            if not num_bytes:
                raise OSError("it has ended")  # after it has read the frame
            at += num_bytes
        return bytes(received)

    def _excess(self, error: OSError, seconds: float) -> str:
        """Return why there is no answer, and end the process."""
        if not isinstance(error, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        code = self.end()
        if isinstance(error, TimeoutError):
            return f"takes more than {_SLOWEST * (seconds + 1):g} seconds"
        if code == -signal.SIGPROF:
            given = f"{seconds:g} second{'s' * (seconds != 1)}"
            return f"takes more than {given} of processor time (chat_template_seconds)"
        return "takes more than its process may have: " + (
            f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"
        )

    def end(self) -> int:
        self._socket.close()
        self._process.kill()
        return self._process.wait()


def _packed(asked: dict[str, Any]) -> bytes:
    try:
        return to_json(asked, inf_nan_mode="constants")  # a fourth of the other's time
    except ValueError:  # half a character
        return json.dumps(asked).encode()


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class TemplateProcesses:
    """Processes for all templates of this one. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[_TemplateProcess] = []  # the last is the one that was used last
        self._num_taken = 0
        self._changed = threading.Condition()  # guards both; told of each that is put back
        # Threads of their own: those that wait for a template must not keep others from tokenising.
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, "template")

    def submit(self, call: Callable[[], str]) -> "Future[str]":
        """Make a call that renders on a thread of its own; further ones wait for their turn."""
        return self._threads.submit(call)

    def compile(self, template: str, seconds: float) -> frozenset[str]:
        """Compile a template and return the names that it reads. Raises TemplateProblemError."""
        return frozenset(json.loads(self._asked(lambda each: _compiled(each, template, seconds))))

    def render(self, template: str, values: Mapping[str, Any], seconds: float) -> str:
        """Render a template. Raises TemplateProblemError."""

        def rendered(process: _TemplateProcess) -> str:
            if process.template != template:
                _compiled(process, template, seconds)
            return process.ask({"values": values}, seconds)

        return self._asked(rendered)

    def _asked(self, ask: Callable[[_TemplateProcess], str]) -> str:
        """Ask an idle process, or a new one. Raises TemplateProblemError."""
        process = self._taken()
        try:
            try:
                return ask(process)
            except _ProcessLostError:
                # Something killed an idle process, such as the kernel where memory runs out.
                process = _started()
                return ask(process)
        finally:
            self._put(process)

    def close(self) -> None:
        """End the processes that have nothing to do."""
        with self._changed:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _taken(self) -> _TemplateProcess:
        """Return an idle process, or a new one. Raises TemplateProblemError."""
        process = None
        with self._changed:
            self._changed.wait_for(lambda: self._idle or not self._num_taken, _PATIENCE_S)
            while self._idle and process is None:
                process = self._idle.pop()
                if not process.is_alive:
                    process.end()
                    process = None
            self._num_taken += 1
        try:
            return process or _started()
        except BaseException:
            self._give_back(None)
            raise

    def _put(self, process: _TemplateProcess) -> None:
        """Keep a process warm, or a new one in the place of one that is over."""
        kept: _TemplateProcess | None = process
        if not process.is_alive:
            process.end()
            try:
                kept = _started()
            except TemplateProblemError:
                kept = None  # the next chat tries again
        self._give_back(kept)

    def _give_back(self, process: _TemplateProcess | None) -> None:
        """Let another thread go on, with this process if there is one."""
        with self._changed:
            self._num_taken -= 1
            is_kept = process is not None and len(self._idle) < _NUM_WARM
            if process is not None and is_kept:
                self._idle.append(process)
            self._changed.notify()
        if process is not None and not is_kept:
            process.end()


def _started() -> _TemplateProcess:
    """Start a process. Raises TemplateProblemError."""
    try:
        return _TemplateProcess()
    except OSError as error:  # no more processes, descriptors or memory
        raise TemplateProblemError(f"no process for it can be started: {error}") from error


def _compiled(process: _TemplateProcess, template: str, seconds: float) -> str:
    """Let a process compile a template, and return its answer. Raises TemplateProblemError."""
    process.template = None
    names = process.ask({"template": template}, seconds)
    process.template = template
    return names


@cache
def template_processes() -> TemplateProcesses:
    """Return the processes of this one, which are started when they are needed."""
    processes = TemplateProcesses()
    atexit.register(processes.close)  # they would end by themselves, when their input ends
    return processes
