"""The start with replicas: a router on the public socket, in front of servers on Ray."""

import asyncio
import itertools
import signal
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.process.hangups import SignalTimes, end_process
from ropewalk.server.sentences import DIED, Teller
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.start import Start, started

if TYPE_CHECKING:
    from ropewalk.server.ray.command import Replicas
    from ropewalk.server.startup.lifecycle import GracefulServer

_LOOK_S = 1.0  # between two looks at whether a thread still serves


def serve_on_ray(settings: ServeSettings, keys: KeyTable, teller: Teller) -> None:
    """Serve with a router in front of servers on Ray, until a signal ends it."""
    with started(settings, keys, teller) as start:
        _serve(start)


def _serve(start: Start) -> None:
    from ropewalk.server.ray.command import Replicas  # noqa: PLC0415  # an extra
    from ropewalk.server.startup.lifecycle import GracefulServer  # noqa: PLC0415

    running: Future[asyncio.AbstractEventLoop] = Future()
    server = GracefulServer(
        start.settings, start.answers, lambda: running.set_result(asyncio.get_running_loop())
    )
    # A signal during the start must end what has begun on Ray.
    server.serve_without_model(lambda: None)
    serving = threading.Thread(target=_run, args=(server, start.listener, running))
    serving.start()
    loop = running.result()
    replicas = Replicas(start.settings, start.listener, is_open=not start.keys.keys)
    banner = None
    # Ray's processes end with the thread that starts them, so that is the main one.
    try:
        start.progress.enter("starting the replicas")
        start.hangups.refuse("replicas do not read settings again, restart the server")
        replicas.connect()
        _handle_signals(server)  # after Ray has set its own
        banner = replicas.start(lambda: server.should_exit, start.teller.say)
        if banner is not None:
            _run_on(loop, _begin(start, server, replicas, banner), serving)
        serving.join()  # signals are handled meanwhile
    finally:
        server.should_exit = True
        serving.join()
        replicas.end(at_once=banner is None)


async def _begin(start: Start, server: "GracefulServer", replicas: "Replicas", banner: str) -> None:
    edge = replicas.edge()
    await edge.fleet.ready()
    server.door.app = edge.app
    server.serve_without_model(edge.end_requests)
    start.tell_ready(banner)


def _run(
    server: "GracefulServer",
    listener: socket.socket,
    started: "Future[asyncio.AbstractEventLoop]",
) -> None:
    """Serve in a thread; the main one handles signals."""
    try:
        server.run([listener])
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


def _run_on(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], serving: threading.Thread
) -> None:
    """Run a coroutine on the loop of another thread, unless a signal ends the loop."""
    try:
        begun = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # the loop is closed
        work.close()
        return
    while not wait([begun], _LOOK_S).done:
        if not serving.is_alive():
            return
    with suppress(CancelledError):
        begun.result()


def _handle_signals(server: "GracefulServer") -> None:
    """Let a server in another thread drain at the first signal, and end at the second.

    The code of the second one is 1 if it cuts answers off, as without replicas.
    """
    num_signals, signals = itertools.count(), SignalTimes()

    def handle(number: int, frame: FrameType | None) -> None:
        if not signals.is_new():
            return
        server.handle_exit(number, frame)
        if next(num_signals):
            end_process(DIED if server.door.num_running else 0)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, handle)
