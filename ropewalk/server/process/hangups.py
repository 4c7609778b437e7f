"""Signals before anything is served: SIGHUP is kept, and others end the process at once."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio


_ONE_SIGNAL_S = 1.0  # timeout(1) signals its child, and then the group that the child is in


class SignalTimes:
    """The signals that ask a process to end. Those soon after the first are the same one."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_new(self) -> bool:
        """Note a signal; return whether it is the first one, or a later one of its own."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            return True
        return now_s - self._first_s >= _ONE_SIGNAL_S


class Hangups:
    """The handling of SIGHUP, from before the model loads.

    If the terminal of the process is gone, then SIGHUP ends it, as SIGTERM does. A process that was
    started with the signal ignored (nohup) outlives its terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Handle the signal from now on; `say` tells what a signal during the load means."""
        self._say_plainly = say
        self._is_pending = False
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._ends_with_terminal = not ignored and _has_terminal()
        signal.signal(signal.SIGHUP, self._while_loading)
        # One that came before this line is delivered now (preflight.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def connect(
        self,
        loop: "asyncio.AbstractEventLoop",
        reload: Callable[[], object],
        end: Callable[[], None],
    ) -> None:
        """Call `reload` on the loop for each signal, and for one that came during the load."""

        def hang_up() -> None:
            if self._ends_with_terminal and not _has_terminal():
                end()
            else:
                reload()

        loop.add_signal_handler(signal.SIGHUP, hang_up)
        if self._is_pending:
            reload()

    def refuse(self, why: str) -> None:
        """Tell at each signal from now on why the settings are not read again."""

        def hang_up(*_: object) -> None:
            if self._ends_with_terminal and not _has_terminal():
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self._say(f"SIGHUP: {why}")

        signal.signal(signal.SIGHUP, hang_up)

    def _say(self, line: str) -> None:
        """Print a line from a thread of its own.

        If the signal came in the middle of a line of the log, then this thread holds its lock.
        """
        threading.Thread(target=self._say_or_lose, args=(line,), daemon=True).start()

    def _say_or_lose(self, line: str) -> None:
        with suppress(OSError, RuntimeError):
            self._say_plainly(line)

    def _while_loading(self, *_: object) -> None:
        if self._ends_with_terminal and not _has_terminal():
            end_at_once()
        if not self._is_pending:
            self._say("SIGHUP: the settings will be read again when the model is loaded")
        self._is_pending = True


def end_at_once(*_: object) -> NoReturn:
    """End the process with code 0. Nothing is served yet, and torch cannot be interrupted."""
    end_process(0)


def end_process(code: int) -> NoReturn:
    """End the process with this code, and run no destructors."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed at the start
            # Its reader may be gone, or a signal came in the middle of a write to it.
            with suppress(OSError, RuntimeError):
                stream.flush()
    os._exit(code)


def _has_terminal() -> bool:
    """Return whether the process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
