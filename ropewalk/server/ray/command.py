"""`ropewalk serve --replicas N`: servers on a Ray cluster, and a router on the public socket."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.process.hangups import end_process
from ropewalk.server.ray.sent_settings import new_router_key, route_settings_of
from ropewalk.server.router.edge import Edge
from ropewalk.server.sentences import DIED, Teller
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.lifecycle import GracefulServer
from ropewalk.server.startup.start import started

_OWN_APPLICATION = "ropewalk"  # on a cluster of this machine
_LOOPBACK = "127.0.0.1"
_ANSWER_S = 30.0  # for a short call
_LOOK_S = 0.3  # between two looks at the application's state
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's smallest; nothing large goes through it

# Ray's own defaults are open or talkative. A variable that is set already stays as it is.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
# Ray runs replicas at niceness 15, so that they starve beside any other process.
_OF_OWN_CLUSTER = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}


def serve_on_ray(settings: ServeSettings, keys: KeyTable, teller: Teller) -> None:
    """Serve with a router in front of servers on Ray, until a signal ends it.

    Raises SettingsError if the cluster or the model cannot be had, RuntimeError if a load fails
    otherwise.
    """
    is_ready = False
    with started(settings, keys, teller) as start:
        replicas = Replicas(settings, start.listener, is_open=not keys.keys)

        def load() -> Callable[[], Awaitable[None]]:
            start.progress.enter("starting the replicas")
            banner = replicas.start(lambda: server.should_exit, teller.say)

            async def begin() -> None:
                nonlocal is_ready
                if banner is None:
                    return
                edge = replicas.edge()
                with suppress(TimeoutError):  # the router waits for a server, too
                    async with asyncio.timeout(_ANSWER_S):
                        await edge.fleet.ready()
                server.door.app = edge.app
                server.serve_without_model(edge.end_requests)
                is_ready = True
                start.tell_ready(banner)

            return begin

        server = GracefulServer(settings, start.answers, lambda: server.load(load))
        # A signal during the start must end what has begun on Ray.
        server.serve_without_model(lambda: None)
        start.hangups.refuse("replicas do not read settings again, restart the server")
        try:
            # In the main thread: Ray's processes end with the thread that starts them.
            replicas.connect()
            server.run([start.listener])
        finally:
            if server.force_exit:  # a second signal
                end_process(DIED if server.has_died else 0)
            replicas.end(at_once=not is_ready)


class Replicas:
    """The servers on Ray, from their start to their end."""

    def __init__(self, settings: ServeSettings, listener: socket.socket, *, is_open: bool) -> None:
        """Take the settings, and the public socket, which names the application.

        `is_open`: whether no key is asked for.
        """
        self._is_open = is_open
        self._router_key = new_router_key()
        self._settings = settings
        self._address = os.environ.get("RAY_ADDRESS")
        self._is_own = not self._address
        # Others may serve on a cluster that was joined.
        self._name = _OWN_APPLICATION
        if not self._is_own:
            self._name = f"{self._name}-{socket.gethostname()}-{listener.getsockname()[1]}"
        self._is_connected = False

    def connect(self) -> None:
        """Start a Ray cluster on loopback, or join the one that RAY_ADDRESS names.

        Raises SettingsError if the cluster cannot be had.
        """
        for name, value in {**_ENVIRONMENT, **(_OF_OWN_CLUSTER if self._is_own else {})}.items():
            os.environ.setdefault(name, value)
        import ray  # noqa: PLC0415  # the gate has looked for it

        quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
        self._is_connected = True
        try:
            if not self._is_own:
                ray.init(self._address, **quiet)
            else:
                ray.init(
                    "local",  # not one that happens to run here
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address=_LOOPBACK,
                    **quiet,
                )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = f"RAY_ADDRESS {self._address}" if self._address else "a cluster of this machine"
            raise SettingsError(f"replicas: cannot use {where}: {error}") from error

    def start(self, is_ending: Callable[[], bool], say: Callable[[str], None]) -> str | None:
        """Start the servers, and return their banner when they are ready; None: `is_ending`.

        Raises SettingsError if the model cannot be had, and RuntimeError if its load fails
        otherwise.
        """
        from ray import serve  # noqa: PLC0415

        from ropewalk.server.ray.deployments import servers  # noqa: PLC0415

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if self._is_own:
            serve.start(proxy_location="Disabled")
        target = serve.RunTarget(
            servers(self._settings, self._router_key, _LOOPBACK if self._is_own else None),
            name=self._name,
            route_prefix=None,
        )
        serve.run_many(
            [target],
            wait_for_applications_running=False,
            wait_for_ingress_deployment_creation=False,
        )
        return self._banner() if self._wait(is_ending, say) else None

    def edge(self) -> Edge:
        """Return the router over the servers; call it on the event loop."""
        from ropewalk.server.ray.addresses import ADDRESSES  # noqa: PLC0415

        is_open = self._is_open and self._settings.is_on_loopback
        edge = Edge(route_settings_of(self._settings, self._router_key), is_open=is_open)
        ADDRESSES.follow(edge.set_servers)
        return edge

    def _wait(self, is_ending: Callable[[], bool], say: Callable[[str], None]) -> bool:
        """Return True when the servers are ready, False if the command ends before."""
        from ray import serve  # noqa: PLC0415

        unknown = ""
        while not is_ending():
            time.sleep(_LOOK_S)
            try:
                state = serve.status().applications[self._name]
            except Exception as error:  # noqa: BLE001  # Ray's controller may be busy
                if str(error) != unknown:
                    say(f"the state of the replicas is unknown: {error}")
                unknown = str(error)
                continue
            if state.status == "RUNNING":
                return True
            if state.status == "DEPLOY_FAILED":
                raise _start_error(state)
        return False

    def _banner(self) -> str:
        """Ask a server, which also makes Ray tell the addresses to this process."""
        from ray import serve  # noqa: PLC0415

        from ropewalk.server.ray.deployments import SERVERS  # noqa: PLC0415

        handle = serve.get_deployment_handle(SERVERS, self._name)
        return str(handle.banner.remote().result(timeout_s=_ANSWER_S))

    def end(self, *, at_once: bool) -> None:
        """End the servers, and the cluster if it is the command's own."""
        if not self._is_connected:
            return
        import ray  # noqa: PLC0415
        from ray import serve  # noqa: PLC0415

        with suppress(Exception):
            serve.delete(self._name, _blocking=not at_once)
        with suppress(Exception):
            if self._is_own and not at_once:
                serve.shutdown()
            ray.shutdown()


def _start_error(state: Any) -> SettingsError | RuntimeError:
    """Return the error of an application whose start failed, by the last line that Ray tells."""
    why = _why(state)
    for kind in (SettingsError, RuntimeError):
        _, has_kind, told = why.partition(f"{kind.__name__}: ")
        if has_kind:
            return kind(f"the replicas did not start: {told}")
    return RuntimeError(f"the replicas did not start: {why}")


def _why(state: Any) -> str:
    """Return the last line of the first deployment that failed."""
    for deployment in state.deployments.values():
        if deployment.message:
            return str(deployment.message).strip().splitlines()[-1]
    return str(state.message)
