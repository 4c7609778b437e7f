"""The API as a replica: the application of a plain server over remote engines.

It either accepts connections itself, on the socket that the command lends, or answers what Ray
Serve's proxy passes on.
"""

import asyncio
import signal
from contextlib import suppress

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from ropewalk.model_runtime.engine.admission import EngineClient
from ropewalk.server.access.keys import KeyTable
from ropewalk.server.api.service import Service
from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.metrics import Metrics
from ropewalk.server.ray.ray_replicas import RayReplicas
from ropewalk.server.replicas.fleet_metrics import FleetMetrics
from ropewalk.server.replicas.listener import borrowed_listener
from ropewalk.server.replicas.remote_engine import RemoteEngine
from ropewalk.server.replicas.routes import ROUTES
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.app import create_app
from ropewalk.server.startup.gate import access_policy_of
from ropewalk.server.startup.lifecycle import GracefulServer
from ropewalk.server.startup.load_model import load_model_tokenizer
from ropewalk.server.startup.load_service import ServedModel, make_service


class ApiReplica:
    """Serves HTTP over the engines behind a handle."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        settings: ServeSettings,
        keys: KeyTable,
        engines: DeploymentHandle,
        listener: str | None,
    ) -> None:
        """Wait for an engine, and serve. `listener`: where the command lends its socket."""
        log_to_stderr(settings.log_format, settings.log_level)
        # Another handle: one that was sent here keeps the transport of the process that made it.
        application = serve.get_replica_context().app_name
        engines = await asyncio.to_thread(
            serve.get_deployment_handle, engines.deployment_name, application
        )
        served: ServedModel = await engines.describe.remote()
        self._banner = served.banner
        tokenizer = await asyncio.to_thread(load_model_tokenizer, settings)
        config = served.plan.config

        def flush() -> None:
            service.output_queue.flush()

        replicas = RayReplicas(
            engines,
            ROUTES,
            config.page_size,
            flush,
            wait_s=settings.replica_wait_seconds,
            silence_s=settings.replica_silence_seconds,
        )

        def make_engine(metrics: Metrics) -> EngineClient:
            assert isinstance(metrics, FleetMetrics)
            metrics.follow(replicas.collect, lambda: ROUTES.choice.replicas)
            replicas.on_routed = metrics.counts.predicted.inc
            return RemoteEngine(
                config,
                replicas,
                metrics,
                metrics.counts,
                most_attempts=settings.continue_attempts,
            )

        service = make_service(
            settings, served, tokenizer, make_engine, keys=keys, watch=FleetMetrics
        )
        await self._serve(settings, service, listener)

    async def _serve(self, settings: ServeSettings, service: Service, listener: str | None) -> None:
        self._is_ready = asyncio.Event()
        self._shutdown_s = settings.shutdown_timeout_seconds
        policy = access_policy_of(
            settings, service.key_ring, service.max_len, has_own_port=listener is not None
        )
        app = create_app(service, policy)
        self._server = GracefulServer(settings, app, self._is_ready.set)
        self._server.serve_model(service, app, policy.spans)
        self._serving: asyncio.Task[None] | None = None
        if listener is None:
            return
        connections = await asyncio.to_thread(borrowed_listener, listener)
        self._serving = asyncio.ensure_future(self._server.serve([connections]))
        await self._is_ready.wait()

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray calls it
        """Return what Ray Serve's proxy asks."""
        return self._server.door

    async def banner(self) -> str:
        return self._banner

    async def drain(self) -> None:
        """Refuse new requests, and return when the running ones have ended or time is up."""
        if self._serving is not None:
            self._server.handle_exit(signal.SIGTERM, None)
            await asyncio.wait([self._serving])
            return
        await self._server.door.drain(self._shutdown_s)
        self._server.stop_engine()

    async def check_health(self) -> None:
        """Raise RuntimeError if connections are no longer accepted."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """End the running requests of a replica that Ray removes."""
        with suppress(AttributeError):  # it never began to serve
            await self.drain()
