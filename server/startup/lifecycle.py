"""The life of the server process once the port answers: loading, serving, draining and shutdown.

On SIGTERM the server refuses new requests, and in-flight requests may finish. A second signal ends
the process at once.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.api.service import Service
from ropewalk.server.middleware.acceptor import Acceptor
from ropewalk.server.middleware.availability import AvailabilityGate
from ropewalk.server.middleware.connections import (
    ConnectionLimits,
    LimitedProtocol,
    OpenConnections,
)
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.app import AccessPolicy, create_app
from ropewalk.server.startup.gate import access_policy_of
from ropewalk.server.startup.load_service import load_service
from ropewalk.server.startup.progress import LoadingProgress
from ropewalk.server.startup.reload import Reloader

if TYPE_CHECKING:
    from ropewalk.server.process.hangups import Hangups

_FAREWELL_S = 5.0  # for the error events of requests that did not finish

_log = structlog.get_logger(__name__)


def loaded_server(
    settings: ServeSettings,
    keys: KeyTable,
    progress: LoadingProgress,
    on_ready: Callable[[str], None],
) -> "GracefulServer":
    """Load the model and return a server that has not started.

    `on_ready` is called with the banner when it serves. Raises ModelError or SettingsError.
    """
    progress.watch_compiler()
    service, banner = load_service(settings, progress.enter, progress.downloaded, keys)
    policy = access_policy_of(settings, service.key_ring, service.max_len)
    return GracefulServer(settings, service, policy, partial(on_ready, banner))


class GracefulServer(uvicorn.Server):
    """A uvicorn server with an availability gate and its own signal handling."""

    def __init__(
        self,
        settings: ServeSettings,
        service: Service,
        policy: AccessPolicy,
        on_ready: Callable[[], None],
    ) -> None:
        """Configure uvicorn. Raises SettingsError if the TLS files cannot be loaded."""
        self.door = AvailabilityGate(create_app(service, policy))
        super().__init__(_uvicorn_config(settings, self.door))
        self._spans = policy.spans
        self.has_died = False  # the engine ended by itself, or a second signal came
        self._settings = settings
        self._on_ready = on_ready
        self._service = service
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled_s: float | None = None  # time.monotonic() of the first signal
        self._num_unfinished = 0  # requests that were running when the time was up
        self._draining: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._hangups: Hangups | None = None
        self._reloader: Reloader | None = None

    def reload_on(self, hangups: "Hangups", flags: Mapping[str, Any]) -> None:
        """Read the settings again at each SIGHUP, from the same `flags`, once the server runs."""
        self._hangups, self._reloader = hangups, Reloader(flags, self._settings, self._service)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engine, accept connections, and say so."""
        self._service.engine.start(self._engine_died, self._service.output_queue.flush)
        await super().startup([])  # uvicorn accepts nothing itself
        self._accept(sockets or [])
        self._loop = asyncio.get_running_loop()
        if self._hangups is not None:
            end = partial(self.handle_exit, signal.SIGHUP, None)
            self._hangups.connect(self._loop, self._reload, end)
        self._on_ready()

    def _accept(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections of these sockets."""
        settings, config = self._settings, self.config
        limits = ConnectionLimits(
            settings.max_connections, settings.head_timeout_seconds, settings.send_timeout_seconds
        )
        shared = OpenConnections(limits)

        def make_protocol() -> LimitedProtocol:
            state = self.lifespan.state
            return LimitedProtocol(config, self.server_state, state, shared=shared)

        acceptors = [Acceptor(each, make_protocol, shared, config.ssl) for each in sockets]
        self.servers = acceptors  # type: ignore[assignment]  # it closes them, and waits

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal: the first one drains, a second one ends the process at once."""
        if self._is_ending or self._loop is None:
            self.has_died = self._is_ending
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        # Logging from the signal's handler could interrupt another line.
        self._loop.call_soon_threadsafe(self._begin_to_end, signal.Signals(sig).name)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, then stop the engine and log how long the end took."""
        await super().shutdown(sockets)
        self.stop_engine()
        if self._spans is not None:
            self._spans.stop()
        if self._signalled_s is not None:
            seconds = round(time.monotonic() - self._signalled_s, 2)
            _log.info("ended", after_s=seconds, unfinished=self._num_unfinished)

    def stop_engine(self) -> None:
        """End every request with an error. Has no effect if the engine has ended."""
        self._service.engine.stop()

    def _reload(self) -> None:
        assert self._reloader is not None
        self._reloading = asyncio.ensure_future(self._reloader.reload())

    def _engine_died(self) -> None:
        self.has_died = True
        self.should_exit = True

    def _begin_to_end(self, name: str) -> None:
        self._signalled_s = time.monotonic()
        _log.info(
            "shutdown",
            signal=name,
            running=self.door.num_running,
            limit_s=self._settings.shutdown_timeout_seconds,
        )
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if not await self.door.drain(self._settings.shutdown_timeout_seconds):
            self._num_unfinished = self.door.num_running
            await asyncio.to_thread(self.stop_engine)
            await self.door.drain(_FAREWELL_S)
        self.should_exit = True


def _uvicorn_config(settings: ServeSettings, door: AvailabilityGate) -> uvicorn.Config:
    config = uvicorn.Config(
        door,
        lifespan="off",
        loop="asyncio",  # also where an extra has installed another one
        ws="none",
        http=LimitedProtocol,
        log_config=None,  # its lines have the format of ours (server/log_lines.py)
        log_level=settings.log_level if settings.log_level in ("debug", "error") else "warning",
        access_log=False,
        timeout_graceful_shutdown=int(_FAREWELL_S),
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:  # ssl's errors are subclasses of it
        raise SettingsError(f"ssl_certfile, ssl_keyfile: {error}") from error
    return config
