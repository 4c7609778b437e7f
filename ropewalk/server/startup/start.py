"""The start of a server: the port answers first, then everything heavy is imported."""

import gc
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.process.hangups import Hangups, end_at_once
from ropewalk.server.sentences import Teller
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.gate import access_policy_of, listening_socket, url_of
from ropewalk.server.startup.loading_answers import LoadingAnswers
from ropewalk.server.startup.progress import LoadingProgress
from ropewalk.server.version import version_and_commit

if TYPE_CHECKING:
    from ropewalk.server.startup.lifecycle import GracefulServer

# An answer waits about ten times for the interpreter, which a load, or the parsing of a long body,
# holds this long at a time (bar its long steps). Python's default is 0.005.
_SWITCH_S = 0.0002


def serve_model(
    settings: ServeSettings, keys: KeyTable, stated: Mapping[str, Any], teller: Teller
) -> bool:
    """Serve until a signal or the engine's end; return whether the process should end at once.

    `stated`: what the settings were made from, beside the environment and the file.
    Raises what the load raises.
    """
    with started(settings, keys, teller) as start:
        server = start.serve(stated)
    server.stop_engine()
    return server.has_died


class Start:
    """The start of a server on a socket that listens already."""

    def __init__(
        self, settings: ServeSettings, keys: KeyTable, listener: socket.socket, teller: Teller
    ) -> None:
        self.settings, self.keys = settings, keys
        self.listener, self.teller = listener, teller
        self.hangups = Hangups(teller.say)
        self._url = url_of(settings, listener)
        self.progress = LoadingProgress(teller.say)
        self.answers = LoadingAnswers(settings, self.progress)
        sys.setswitchinterval(_SWITCH_S)
        teller.say(f"loading; {self._url} answers 503 until the model has passed its check")

    def serve(self, stated: Mapping[str, Any]) -> "GracefulServer":
        """Serve until a signal or the engine's end. Raises what the load raises."""
        from ropewalk.server.startup.lifecycle import GracefulServer  # noqa: PLC0415

        server = GracefulServer(
            self.settings, self.answers, lambda: server.load(lambda: self._load(server, stated))
        )
        server.run(sockets=[self.listener])
        return server

    def tell_ready(self, banner: str) -> None:
        self.progress.finish()
        self.teller.ready(version_and_commit(), banner, self._url)

    def _load(
        self, server: "GracefulServer", stated: Mapping[str, Any]
    ) -> Callable[[], Awaitable[None]]:
        """Import and load; return what begins to serve."""
        settings, progress = self.settings, self.progress
        from ropewalk.server.startup.planning.dry_run import refuse_ahead  # noqa: PLC0415

        refuse_ahead(settings, progress.enter)
        progress.enter("importing")
        from ropewalk.server.startup.app import create_app  # noqa: PLC0415
        from ropewalk.server.startup.load_service import load_service  # noqa: PLC0415
        from ropewalk.server.startup.reload import Reloader  # noqa: PLC0415

        progress.watch_compiler()
        parts = (progress.enter, progress.downloaded, self.keys)
        service, banner = load_service(settings, *parts)
        policy = access_policy_of(settings, service.key_ring, service.max_len)
        app = create_app(service, policy)

        # Whole collections would look through all objects of torch and transformers, and stop every
        # stream for 0.1 s. These live to the end.
        gc.collect()
        gc.freeze()

        async def begin() -> None:
            server.serve_model(service, app, policy.spans)
            server.reload_on(self.hangups, Reloader(stated, settings, service))
            self.tell_ready(banner)

        return begin


@contextmanager
def started(settings: ServeSettings, keys: KeyTable, teller: Teller) -> Iterator[Start]:
    """Listen until the block ends; a signal ends the process while nothing is served yet."""
    with listening_socket(settings) as listener, _ended_by_signals():
        yield Start(settings, keys, listener, teller)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the process at once, with code 0, on a signal while nothing is served yet.

    uvicorn handles signals while it runs.
    """
    before = {each: signal.signal(each, end_at_once) for each in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
