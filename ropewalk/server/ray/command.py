"""`ropewalk serve --replicas N`: a Ray cluster, or a part of one, with the servers on it."""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ropewalk.server.ray.addresses import ADDRESSES
from ropewalk.server.ray.sent_settings import new_router_key, route_settings_of
from ropewalk.server.router.edge import Edge
from ropewalk.server.settings.load import ServeSettings, SettingsError

_OWN_APPLICATION = "ropewalk"  # on a cluster of this machine
_LOOPBACK = "127.0.0.1"
_ANSWER_S = 30.0  # for a short call
_LOOK_S = 0.3  # between two looks at the application's state
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's smallest; nothing large goes through it

# Ray's own defaults are open or talkative. A variable that is set already stays as it is.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
# Ray runs replicas at niceness 15, so that they starve beside any other process.
_OF_OWN_CLUSTER = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}


class Replicas:
    """The servers on Ray, from their start to their end."""

    def __init__(self, settings: ServeSettings, listener: socket.socket, *, is_open: bool) -> None:
        """Take the settings, and the public socket, which names the application.

        `is_open`: whether no key is asked for.
        """
        self._is_open = is_open
        self._router_key = new_router_key()
        self._settings = settings
        self._is_own = settings.ray_address is None
        # Others may serve on a cluster that was joined.
        self._name = _OWN_APPLICATION
        if not self._is_own:
            self._name = f"{self._name}-{socket.gethostname()}-{listener.getsockname()[1]}"
        self._is_connected = False

    def connect(self) -> None:
        """Start a Ray cluster on loopback, or join one.

        Raises SettingsError if the cluster cannot be had.
        """
        for name, value in {**_ENVIRONMENT, **(_OF_OWN_CLUSTER if self._is_own else {})}.items():
            os.environ.setdefault(name, value)
        import ray  # noqa: PLC0415  # the gate has looked for it

        quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
        self._is_connected = True
        try:
            if not self._is_own:
                ray.init(self._settings.ray_address, **quiet)
            else:
                ray.init(
                    "local",  # whatever RAY_ADDRESS says
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address=_LOOPBACK,
                    **quiet,
                )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = self._settings.ray_address or "a cluster of this machine"
            raise SettingsError(f"ray_address: cannot use {where}: {error}") from error

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
