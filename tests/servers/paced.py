"""`python -m tests.servers.paced serve ...`: ropewalk whose steps can be slowed by a signal.

A short answer then lasts until a test has met it, however busy the machine is.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MODULE = "tests.servers.paced"
_SLOW, _QUICK = signal.SIGUSR1, signal.SIGUSR2
_STEP_S = 0.1


@contextmanager
def slowed(*pids: int) -> Iterator[None]:
    """Slow the steps of servers until the block ends. One may have ended by then."""
    try:
        for pid in pids:
            os.kill(pid, _SLOW)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, _QUICK)


def _slow_on_signals() -> None:
    from ropewalk.model_runtime.engine.engine_core import EngineCore

    step = EngineCore.step
    is_slow = threading.Event()

    def paced_step(core: EngineCore) -> int:
        if is_slow.is_set():
            time.sleep(_STEP_S)
        return step(core)

    EngineCore.step = paced_step  # type: ignore[method-assign]
    signal.signal(_SLOW, lambda *_: is_slow.set())
    signal.signal(_QUICK, lambda *_: is_slow.clear())


if __name__ == "__main__":
    from ropewalk.__main__ import main

    _slow_on_signals()
    main()
