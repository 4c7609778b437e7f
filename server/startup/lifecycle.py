"""The life of the server process: loading, serving, draining and shutdown.

The port answers from the start, with 503 until the model has passed its self-check. On SIGTERM the
server refuses new requests, and in-flight requests may finish. A second signal ends the process at
once.
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from server.api.service import Service
from server.app import create_app
from server.middleware.availability import AvailabilityGate
from server.middleware.connections import ConnectionLimits, limited_protocol
from server.settings.load import ServeSettings, SettingsError
from server.startup.gate import access_policy_of
from server.startup.load_service import load_service

_FAREWELL_S = 5.0  # for the error events of requests that did not finish

_log = structlog.get_logger(__name__)


class GracefulServer(uvicorn.Server):
    """A uvicorn server with an availability gate and its own signal handling."""

    def __init__(self, settings: ServeSettings, on_ready: Callable[[str], None]) -> None:
        """Configure uvicorn. `on_ready` is called with the banner once the model is loaded.

        Raises SettingsError if the TLS files cannot be loaded.
        """
        self.door = AvailabilityGate()
        super().__init__(_uvicorn_config(settings, self.door))
        self.failure: Exception | None = None  # the error that prevented serving
        self.has_died = False  # the engine ended by itself, or a second signal came
        self._settings = settings
        self._on_ready = on_ready
        self._service: Service | None = None
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled_s: float | None = None  # time.monotonic() of the first signal
        self._draining: asyncio.Task[None] | None = None
        self._loader: threading.Thread | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and load the model in a thread."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        # A daemon, because loading takes minutes and a signal may arrive meanwhile.
        self._loader = threading.Thread(target=self._load, name="loader", daemon=True)
        self._loader.start()

    @property
    def is_loading(self) -> bool:
        """Return whether the loader thread is still running."""
        return self._loader is not None and self._loader.is_alive()

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
        if self._signalled_s is not None:
            seconds = round(time.monotonic() - self._signalled_s, 2)
            _log.info("ended", after_s=seconds, unfinished=self.door.num_running)

    def stop_engine(self) -> None:
        """End every request with an error. Has no effect if the engine has ended."""
        if self._service is not None:
            self._service.engine.stop()

    def _load(self) -> None:
        assert self._loop is not None
        try:
            service, banner = load_service(self._settings)
            app = create_app(service, access_policy_of(self._settings))
        except Exception as error:  # noqa: BLE001  # the main thread reports it
            self.failure = error
            self.should_exit = True
            return
        self._service = service
        service.engine.start(self._engine_died, service.output_queue.flush)
        self._loop.call_soon_threadsafe(self._open, app, banner)

    def _open(self, app: FastAPI, banner: str) -> None:
        if not self._is_ending:
            self.door.open(app)
            self._on_ready(banner)

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
            await asyncio.to_thread(self.stop_engine)
            await self.door.drain(_FAREWELL_S)
        self.should_exit = True


def _uvicorn_config(settings: ServeSettings, door: AvailabilityGate) -> uvicorn.Config:
    limits = ConnectionLimits(
        settings.max_connections, settings.head_timeout_seconds, settings.send_timeout_seconds
    )
    config = uvicorn.Config(
        door,
        lifespan="off",
        ws="none",
        http=limited_protocol(limits),
        log_level="warning",
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
