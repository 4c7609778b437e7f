"""Ends an engine's process that stands still: a small process that waits for signs of life.

Ray asks the process itself to end. One that is stopped or hangs cannot, and keeps its processors or
its GPU for ever. The system's SIGKILL ends it, and Ray then starts another one at once.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_BEAT_S = 0.5


class Watchdog:
    """A process that kills this one if it shows no sign of life for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        """Begin to watch, until `end`."""
        # No more than the standard library, in a megabyte or ten; it outlives no parent.
        self._process = subprocess.Popen(  # noqa: S603  # our own file, in this interpreter
            [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), str(limit_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._is_over = threading.Event()
        # A thread, because an event loop may be busy for a while without being dead.
        threading.Thread(target=self._beat, name="watchdog", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def _beat(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):  # it has ended
            while not self._is_over.wait(_BEAT_S):
                pipe.write(b".")
                pipe.flush()
            pipe.close()
        self._process.wait()


def watch(pid: int, limit_s: float) -> None:
    """Kill a process if nothing comes from it for `limit_s` seconds; return when it ends."""
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], limit_s)
        if not ready:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        if not os.read(sys.stdin.fileno(), 4096):  # it has ended, or wants no more
            return


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
