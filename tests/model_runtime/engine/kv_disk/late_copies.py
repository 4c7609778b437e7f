"""A stream of copies that run as late as a device may run them, over a cache on a CPU."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from ropewalk.model_runtime.engine.kv_disk import build
from ropewalk.model_runtime.engine.kv_disk.offload.device_pages import DevicePages


class LateDone:
    """The end of one copy."""

    def __init__(self, stream: "LateCopies") -> None:
        self._stream = stream
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        """Wait as the writer and the engine do; a held stream runs it for a step only."""
        while not self.is_over and not self._stream.may_run.wait(0.002):
            pass
        self._stream.run_until(self)


class LateCopies:
    """Copies in order; each runs when a wait needs it, and no sooner.

    Until `may_run` is set, only a step that waits lets them run.
    """

    def __init__(self, *, is_held: bool) -> None:
        self.may_run = threading.Event()
        if not is_held:
            self.may_run.set()
        self.num_waits = 0  # of steps, for copies that had not run
        self._queue: deque[tuple[LateDone, Callable[[], None]]] = deque()
        self._lock = threading.RLock()

    def run(self, copy: Callable[[], None]) -> LateDone:
        """Queue a copy."""
        done = LateDone(self)
        with self._lock:
            self._queue.append((done, copy))
        return done

    def let_steps_wait(self, done: Any) -> None:
        """Run the copies up to this one, because a step could run now."""
        self.num_waits += not done.is_over
        self.run_until(done)

    def run_until(self, done: LateDone) -> None:
        """Run the copies up to this one."""
        with self._lock:
            while not done.is_over:
                first, copy = self._queue.popleft()
                copy()
                first.is_over = True


def use(monkeypatch: pytest.MonkeyPatch, *, is_held: bool = False) -> LateCopies:
    """Let engines on a CPU copy their pages so, as on a GPU."""
    stream = LateCopies(is_held=is_held)
    monkeypatch.setattr(
        build, "_copies", lambda _, __, store: DevicePages(store.page_bytes(), stream)
    )
    return stream
