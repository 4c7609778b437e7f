"""`ropewalk serve --replicas N`: a Ray cluster, or a part of one, and the application on it."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.replicas.listener import ListenerLender
from ropewalk.server.sentences import DIED
from ropewalk.server.settings.load import ServeSettings, SettingsError

_OWN_APPLICATION = "ropewalk"  # on a cluster of this machine
_ANSWER_S = 10.0  # for a short call
_LOOK_S = 1.0  # between two looks at the application's state
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's smallest; outputs do not go through it
_FAREWELL_S = 15.0  # for engines to end, after the time that running requests have

# Ray's own defaults are open or talkative. A variable that is set already stays as it is.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
# Ray runs replicas at niceness 15, so that they starve beside any other process.
_OF_OWN_CLUSTER = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}


def serve_on_ray(
    settings: ServeSettings,
    keys: KeyTable,
    listener: socket.socket,
    hand_over: Callable[[], None],
    on_ready: Callable[[str], None],
    *,
    say: Callable[[str], None],
) -> None:
    """Serve until a signal ends it.

    `hand_over` is called before the API takes the listening socket, `on_ready` with the banner, and
    `say` with what happens meanwhile.
    Raises SettingsError if Ray is missing, or if the cluster or the model cannot be had.
    """
    is_own = settings.ray_address is None
    for name, value in {**_ENVIRONMENT, **(_OF_OWN_CLUSTER if is_own else {})}.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # noqa: F401, PLC0415
        from ray import serve  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(
            f"replicas needs Ray: pip install 'ray[serve]>=2.60' (got {settings.replicas})"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _connect(settings)
    signals = _Signals(say)  # after Ray has set its own
    lender = ListenerLender(listener, hand_over)
    # Others may serve on a cluster that was joined.
    name = _OWN_APPLICATION
    if not is_own:
        name = f"{name}-{socket.gethostname()}-{listener.getsockname()[1]}"
    try:
        _serve(_Application(settings, keys, name, lender.path), on_ready, signals)
    finally:
        lender.close()
        with suppress(Exception):
            serve.delete(name)
        with suppress(Exception):
            _disconnect(settings)


class _Signals:
    """SIGTERM and SIGINT: the first one drains, a second one ends the process at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.came = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._note)
        signal.signal(signal.SIGHUP, self._refuse)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.came.is_set():
            os._exit(DIED)
        self.say(f"{signal.Signals(number).name}: requests that run may end")
        self.came.set()

    def _refuse(self, *_: object) -> None:
        self.say("SIGHUP: replicas do not read settings again, restart the server")


def _connect(settings: ServeSettings) -> None:
    """Start a cluster on loopback, or join one. Raises SettingsError."""
    import ray  # noqa: PLC0415

    quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
    try:
        if settings.ray_address is not None:
            ray.init(settings.ray_address, **quiet)
        else:
            ray.init(
                "local",  # whatever RAY_ADDRESS says
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = settings.ray_address or "a cluster of this machine"
        raise SettingsError(f"ray_address: cannot use {where}: {error}") from error


def _disconnect(settings: ServeSettings) -> None:
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415

    if settings.ray_address is None:
        serve.shutdown()
    ray.shutdown()


def _serve(application: "_Application", on_ready: Callable[[str], None], signals: _Signals) -> None:
    """Deploy, and look after the application until a signal comes. Raises SettingsError."""
    application.deploy()
    is_ready = False
    while not signals.came.wait(_LOOK_S):
        try:
            state = application.state()
            if state.status == "RUNNING" and not is_ready:
                on_ready(application.banner())
                is_ready = True
        except Exception as error:  # noqa: BLE001  # Ray's controller may be busy, or be replaced
            signals.say(f"the state of the replicas is unknown: {error}")
            continue
        if state.status == "DEPLOY_FAILED":
            raise SettingsError(f"the replicas did not start: {_why(state)}")
    if is_ready:
        with suppress(Exception):  # the API may be what has ended
            application.drain()


class _Application:
    """The application on the cluster."""

    def __init__(
        self, settings: ServeSettings, keys: KeyTable, name: str, listener_path: str
    ) -> None:
        self._settings, self._keys = settings, keys
        self._name, self._listener_path = name, listener_path

    def deploy(self) -> None:
        """Begin to deploy it."""
        import ray  # noqa: PLC0415
        from ray import serve  # noqa: PLC0415

        from ropewalk.server.ray.deployments import application  # noqa: PLC0415

        here = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        if self._settings.ray_address is None:
            serve.start(proxy_location="Disabled")
        target = application(
            self._settings,
            self._keys,
            listener=self._listener_path,
            api_resources={f"node:{address}": 0.001},  # where the listening socket is
        )
        serve.run_many(
            [serve.RunTarget(target, name=self._name, route_prefix=None)],
            wait_for_applications_running=False,
            wait_for_ingress_deployment_creation=False,
        )

    def state(self) -> Any:
        from ray import serve  # noqa: PLC0415

        return serve.status().applications[self._name]

    def banner(self) -> str:
        return str(self._api().banner.remote().result(timeout_s=_ANSWER_S))

    def drain(self) -> None:
        """Wait until the running requests have ended, or their time is up."""
        limit_s = self._settings.shutdown_timeout_seconds + _FAREWELL_S
        self._api().drain.remote().result(timeout_s=limit_s)

    def _api(self) -> Any:
        from ropewalk.server.ray.deployments import api_handle  # noqa: PLC0415

        return api_handle(self._name)


def _why(state: Any) -> str:
    """Return the last line of the first deployment that failed."""
    for deployment in state.deployments.values():
        if deployment.message:
            return str(deployment.message).strip().splitlines()[-1]
    return str(state.message)
