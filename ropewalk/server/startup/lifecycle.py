"""The life of the server process once the port answers: loading, serving, draining and shutdown.

On SIGTERM the server refuses new requests, and in-flight requests may finish. A second signal ends
the process at once, and so does one while the model loads. Signals within a second are one.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, cast

import structlog
import uvicorn

from ropewalk.server.middleware.availability import AvailabilityGate
from ropewalk.server.middleware.connections import ChunkProtocol
from ropewalk.server.process.hangups import Hangups, SignalTimes, end_at_once
from ropewalk.server.settings.load import ServeSettings

if TYPE_CHECKING:  # the port answers before these are imported
    from starlette.types import ASGIApp

    from ropewalk.server.access.open_request import SpanSource
    from ropewalk.server.api.service import Service
    from ropewalk.server.settings.route_settings import RouteSettings
    from ropewalk.server.startup.reload import Reloader

# All headers together. It is twice what nginx passes on by default.
_HEAD_BYTES = 65_536
_FAREWELL_S = 5.0  # for the error events of requests that did not finish

_log = structlog.get_logger(__name__)


class GracefulServer(uvicorn.Server):
    """A uvicorn server with an availability gate and its own signal handling."""

    def __init__(
        self,
        settings: "ServeSettings | RouteSettings",
        app: "ASGIApp",
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Configure uvicorn. `on_start` is called on the event loop when `app` answers."""
        self.door = AvailabilityGate(app)
        super().__init__(_uvicorn_config(settings, self.door))
        self.has_died = False  # the engine ended by itself, or a second signal cut answers off
        self._settings = settings
        self._on_start = on_start
        self._service: Service | None = None  # None: the model is loading, or there is none
        self._end_requests: Callable[[], None] = lambda: None
        self._is_loading = True
        self._spans: SpanSource | None = None
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = SignalTimes()
        self._signalled_s: float | None = None  # time.monotonic() of the first signal
        self._num_unfinished = 0  # requests that ran when the time was up, or at a second signal
        self._loading: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None

    def load(self, load: Callable[[], Callable[[], Awaitable[None]]]) -> None:
        """Call `load` in a thread, and then what it returns on the event loop, which calls this.

        `run` raises what they raise. A thread, because signals are handled between two steps of the
        main thread only, and loading has long ones.
        """

        async def finish() -> None:
            try:
                await (await asyncio.to_thread(load))()
            except BaseException:
                self.should_exit = True
                raise

        self._loading = asyncio.ensure_future(finish())

    def serve_model(
        self, service: "Service", app: "ASGIApp", spans: "SpanSource | None" = None
    ) -> None:
        """Start the engine and let `app` answer. Call it before the start or on the event loop."""
        self._service, self._spans, self._is_loading = service, spans, False
        service.engine.start(self._engine_died, service.output_queue.flush)
        self.door.app = app

    def serve_without_model(self, end_requests: Callable[[], None]) -> None:
        """Let requests that run end when a signal comes, although no engine is there.

        `end_requests` is called when their time is up.
        """
        self._is_loading, self._end_requests = False, end_requests

    def reload_on(self, hangups: Hangups, reloader: "Reloader") -> None:
        """Read the settings again at each SIGHUP from now on. Call it on the event loop."""

        def reload() -> None:
            self._reloading = asyncio.ensure_future(reloader.reload())

        end = partial(self.handle_exit, signal.SIGHUP, None)
        hangups.connect(asyncio.get_running_loop(), reload, end)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say so."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._on_start()

    async def main_loop(self) -> None:
        """Run until the end."""
        await super().main_loop()
        if self._loading is not None:
            await self._loading  # a signal while it runs ends the process at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal: the first one drains, a second one ends the process at once."""
        if self._is_loading:
            end_at_once()
        if not self._signals.is_new():
            return
        if self._is_ending or self._loop is None:
            self.has_died |= self._is_ending and self.door.num_running > 0
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        # Logging from the signal's handler could interrupt another line.
        self._loop.call_soon_threadsafe(self._begin_to_end, signal.Signals(sig).name)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, then stop the engine and log how long the end took."""
        self._num_unfinished = max(self._num_unfinished, self.door.num_running)
        if self.force_exit:
            for each in list(self.server_state.connections):
                cast("ChunkProtocol", each).cut_off()
        await super().shutdown(sockets)
        self.stop_engine()
        if self._spans is not None:
            self._spans.stop()
        if self._signalled_s is not None:
            seconds = round(time.monotonic() - self._signalled_s, 2)
            _log.info("ended", after_s=seconds, unfinished=self._num_unfinished)

    def stop_engine(self) -> None:
        """End every request with an error. Has no effect if the engine has ended."""
        if self._service is not None:
            self._service.engine.stop()

    def _engine_died(self) -> None:
        self.has_died = True
        self.should_exit = True

    def _begin_to_end(self, name: str) -> None:
        self._signalled_s = time.monotonic()
        self._draining = asyncio.ensure_future(self._drain())
        _log.info(
            "shutdown",
            signal=name,
            running=self.door.num_running,
            limit_s=self._settings.shutdown_timeout_seconds,
        )

    async def _drain(self) -> None:
        if not await self.door.drain(self._settings.shutdown_timeout_seconds):
            self._num_unfinished = self.door.num_running
            await asyncio.to_thread(self.stop_engine)
            self._end_requests()
            await self.door.drain(_FAREWELL_S)
        self.should_exit = True


def _uvicorn_config(
    settings: "ServeSettings | RouteSettings", door: AvailabilityGate
) -> uvicorn.Config:
    return uvicorn.Config(
        door,
        lifespan="off",
        loop="asyncio",  # also where an extra has installed another one
        ws="none",
        http=ChunkProtocol,
        log_config=None,  # its lines have the format of ours (server/log_lines.py)
        log_level=settings.log_level if settings.log_level in ("debug", "error") else "warning",
        access_log=False,
        timeout_graceful_shutdown=int(_FAREWELL_S),
        limit_concurrency=settings.max_connections,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
