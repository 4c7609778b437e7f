"""An event loop whose waits take no time: its clock jumps to the next timer.

For code that waits by timers of asyncio alone. Limits in seconds are then exact on any machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """A selector that adds up what it was to wait, instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; the clock jumps only if nothing is."""
        ready = super().select(0)
        if not ready and timeout is None:  # nothing is planned: a thread has to wake the loop
            return super().select(None)
        if not ready and timeout is not None:
            self.waited_s += max(0.0, timeout)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """A loop that reads the time from its selector."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the seconds that were waited for."""
        return self._jumping.waited_s


def run_at_once(test: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on such a loop."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(test)
