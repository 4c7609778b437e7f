"""`ropewalk serve`, unchanged but for signals that break its engine, and a log that says it all.

`python -m tests.server.fuzz.breakable serve ...`; what each signal does is in `SIGNALS`.
"""

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

MODULE = "tests.server.fuzz.breakable"
KEY = "k3y-of-a-client"  # what the tests' server of this kind asks for
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
DIE, FAIL, STALL = signal.SIGUSR1, signal.SIGRTMIN, signal.SIGUSR2
SIGNALS = {
    DIE: "the next step raises outside of what a step may raise: the thread ends",
    FAIL: "the next forward pass raises: the requests of that step end",
    STALL: "the next step does not end, until the same signal comes again",
}
# The variable with the number of outputs that the client of a stream may lag behind.
MOST_UNREAD = "BREAKABLE_MAX_UNREAD"
# The state between the engine's death and the process' end is otherwise a matter of luck.
_DYING_S = 2.0


def break_on_signals() -> None:
    """Put the faults where a signal can reach them."""
    from ropewalk.model_runtime.engine.engine_core import EngineCore
    from ropewalk.model_runtime.runner.model_runner import ModelRunner
    from ropewalk.server.api import health, reservation
    from ropewalk.server.startup.lifecycle import GracefulServer

    health.STALL_S = 1.0  # a test waits for it
    reservation.MAX_UNREAD = int(os.environ.get(MOST_UNREAD, reservation.MAX_UNREAD))
    dies, fails, flows = (threading.Event() for _ in range(3))
    flows.set()
    step, prepare, engine_died = (
        EngineCore.step,
        ModelRunner.prepare,
        GracefulServer._engine_died,
    )

    def breakable_step(core: EngineCore) -> int:
        if dies.is_set():
            raise RuntimeError("out of hemp")
        flows.wait()
        return step(core)

    def breakable_prepare(runner: ModelRunner, *arguments: Any) -> Any:
        if fails.is_set():
            fails.clear()
            raise RuntimeError("out of chalk")
        return prepare(runner, *arguments)

    def slowly(server: GracefulServer) -> None:
        time.sleep(_DYING_S)
        engine_died(server)

    for owner, name, placeholder in (
        (EngineCore, "step", breakable_step),
        (ModelRunner, "prepare", breakable_prepare),
        (GracefulServer, "_engine_died", slowly),
    ):
        setattr(owner, name, placeholder)
    signal.signal(DIE, lambda *_: dies.set())
    signal.signal(FAIL, lambda *_: fails.set())
    signal.signal(STALL, lambda *_: flows.clear() if flows.is_set() else flows.set())


def log_everything() -> None:
    """Log every library's own lines too, and one for each request."""
    import uvicorn

    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    make = uvicorn.Config.__init__

    def talkative(config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        make(config, *arguments, **{**options, "log_level": "debug", "access_log": True})

    uvicorn.Config.__init__ = talkative  # type: ignore[method-assign]


if __name__ == "__main__":
    from ropewalk.__main__ import main

    log_everything()
    break_on_signals()
    main()
