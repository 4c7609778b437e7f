"""The router as a replica of Ray Serve: it answers what Ray Serve's own proxy passes on."""

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.middleware.availability import AvailabilityGate
from ropewalk.server.ray.addresses import ADDRESSES
from ropewalk.server.ray.sent_settings import route_settings_of
from ropewalk.server.router.edge import Edge
from ropewalk.server.settings.load import ServeSettings


class ApiReplica:
    """Serves HTTP over the servers behind a handle."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: ServeSettings, router_key: str, servers: DeploymentHandle
    ) -> None:
        """Wait for a server, and serve."""
        log_to_stderr(settings.log_format, settings.log_level)
        self._shutdown_s = settings.shutdown_timeout_seconds
        edge = Edge(route_settings_of(settings, router_key), is_open=False)
        ADDRESSES.follow(edge.set_servers)
        # A call makes Ray tell the addresses to this process.
        handle = serve.get_deployment_handle(
            servers.deployment_name, serve.get_replica_context().app_name
        )
        await handle.banner.remote()
        await edge.fleet.ready()
        self._door = AvailabilityGate(edge.app)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray calls it
        """Return what Ray Serve's proxy asks."""
        return self._door

    async def __del__(self) -> None:
        """Let the running requests end. Ray calls it when it removes the replica."""
        door: AvailabilityGate | None = getattr(self, "_door", None)
        if door is not None:  # it began to serve
            await door.drain(self._shutdown_s)
