"""Render chat templates in one process beside the server, with a limit of time.

What a client sends can make a template slow, and Jinja keeps the interpreter from other threads. A
chat that exceeds the time ends the process, and a new one takes its place. Other chats wait.
"""

import atexit
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

from pydantic_core import to_json

from ropewalk.model_runtime.child_process import bare_environment, command_of
from ropewalk.model_runtime.text.template_process import DONE, ENCODING, REFUSED

SECONDS = 2.0  # of processor time; an ordinary chat takes less than a thousandth of it


class TemplateProblemError(Exception):
    """A template refuses its messages, or fails on them; the text is a part of a sentence."""


class TemplateRefusedError(TemplateProblemError):
    """The template's own words, or Jinja's, about a template or its messages."""


class TemplateExcessError(TemplateProblemError):
    """A template exceeds a limit, `takes more than ...`."""


class TemplateRenderer:
    """The process, and a thread that waits for it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next, and an exchange as a whole
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        # Of its own: chats that wait must not keep others from tokenising.
        self._thread = ThreadPoolExecutor(1, "template")

    def submit(self, call: Callable[[], str]) -> "Future[str]":
        """Make a call that renders on the thread, after those that were submitted before."""
        return self._thread.submit(call)

    def compile(self, template: str) -> frozenset[str]:
        """Compile a template and return the names that it reads. Raises TemplateProblemError."""
        return frozenset(json.loads(self._asked({"template": template})))

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render a template. Raises TemplateProblemError."""
        return self._asked({"template": template, "values": values})

    def close(self) -> None:
        """End the process; the next call starts another one."""
        with self._lock:
            self._end()

    def _asked(self, asked: Mapping[str, Any]) -> str:
        """Return the text of an answer. Raises TemplateProblemError."""
        content = _packed({**asked, "seconds": SECONDS})
        with self._lock:
            answer = self._exchanged(content)
        kind, text = answer[:1], answer[1:].decode(*ENCODING)
        if kind == DONE:
            return text
        raise (TemplateRefusedError if kind == REFUSED else TemplateProblemError)(text)

    def _exchanged(self, content: bytes) -> bytes:
        """Send what is asked and return the answer. Raises TemplateProblemError."""
        if self._running is None or self._running[0].poll() is not None:
            self._end()
            self._running = _started()
        connection = self._running[1]
        try:
            connection.send_bytes(content)
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            code = self._end()
            self._running = _started()  # now, so that the next chat need not wait for its imports
            told = f"ended its process with code {code}"
            if code == -signal.SIGPROF:
                told = f"takes more than {SECONDS:g} seconds of processor time"
            raise TemplateExcessError(told) from error

    def _end(self) -> int | None:
        """End the process, and return its exit code; it may have ended by itself."""
        if self._running is None:
            return None
        process, connection = self._running
        self._running = None
        connection.close()
        process.kill()
        return process.wait()


def _started() -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start a process. Raises TemplateProblemError."""
    ours, theirs = Pipe()
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603  # our own module, this interpreter
                command_of("ropewalk.model_runtime.text.template_process"),
                env=bare_environment(),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:  # no more processes, descriptors or memory
            ours.close()
            raise TemplateProblemError(f"no process for it can be started: {error}") from error
    return process, ours


def _packed(asked: Mapping[str, Any]) -> bytes:
    try:
        return to_json(asked, inf_nan_mode="constants")  # a fourth of the other's time
    except ValueError:  # half a character
        return json.dumps(asked).encode()


@cache
def template_renderer() -> TemplateRenderer:
    """Return the renderer of this process, which starts when it is first needed."""
    renderer = TemplateRenderer()
    atexit.register(renderer.close)
    return renderer
