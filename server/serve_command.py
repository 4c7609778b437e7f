"""`ropewalk serve [MODEL]`: the port answers first, then everything heavy is imported."""

import asyncio
import itertools
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ropewalk.model_runtime.loading.hub.local_model import is_hub_id, is_there
from ropewalk.server.access.keys import KeyTable
from ropewalk.server.process.hangups import Hangups, SignalTimes, end_at_once, end_process
from ropewalk.server.sentences import DIED, Teller, sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.settings.sections import SECTIONS, DeploymentSettings
from ropewalk.server.startup.gate import (
    access_policy_of,
    checked,
    key_warnings,
    listening_socket,
    url_of,
)
from ropewalk.server.startup.loading_answers import LoadingAnswers
from ropewalk.server.startup.progress import LoadingProgress
from ropewalk.server.version import version_and_commit

if TYPE_CHECKING:
    from ropewalk.server.ray.command import Replicas
    from ropewalk.server.startup.lifecycle import GracefulServer


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@with_flags(*SECTIONS)
def serve(**flags: Any) -> None:
    """Serve MODEL: a folder, a GGUF file or a hub id. Default: the embedded model.

    OpenAI's routes are under /v1, metrics under /metrics. Every flag is also an environment
    variable, named in brackets, and a key of the YAML file. For MODEL they are ROPEWALK_MODEL and
    `model`. A flag overrides the variable, and a variable overrides the file.
    """
    import structlog  # noqa: PLC0415  # the help of this command needs none

    from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415

    with sentences() as teller:
        stated = given(flags)
        settings = load_settings(stated)
        log_to_stderr(settings.log_format, settings.log_level)
        if settings.log_format == "json":
            teller.use_json(structlog.get_logger(__name__))
        # Errors of named files are reported before anything is imported.
        keys = checked(settings)
        _refuse_before_listening(settings)
        for warning in key_warnings(settings, stated):
            teller.say(warning)
        has_died = serve_settings(settings, keys, stated, teller)
    if has_died:
        end_process(DIED)  # on a broken GPU torch's destructors may abort, with another code


_NAMING = ("deployments", "model_aliases")  # settings that name deployments


def _refuse_before_listening(settings: ServeSettings) -> None:
    """Raise what can be told before the port opens, if there may be something.

    The look takes 0.2 s. The servers on Ray have models of their own.
    """
    model, stated = settings.model, settings.model_fields_set
    is_absent = model is not None and not is_hub_id(model) and not is_there(model)
    names_some = not stated.isdisjoint({*DeploymentSettings.model_fields, *_NAMING})
    if settings.replicas is None and (is_absent or names_some):
        from ropewalk.server.startup.planning.dry_run import refuse_before_listening  # noqa: PLC0415

        refuse_before_listening(settings)


def serve_settings(
    settings: ServeSettings, keys: KeyTable, stated: Mapping[str, Any], teller: Teller
) -> bool:
    """Serve until a signal or the engine's end; return whether the process should end at once.

    `stated`: what the settings were made from, beside the environment and the file.
    Raises what the load raises.
    """
    with listening_socket(settings) as listener, _ended_by_signals():
        start = _Start(settings, keys, listener, teller)
        if settings.replicas is not None:
            start.serve_on_ray()
            return False
        server = start.serve(stated)
    server.stop_engine()
    return server.has_died


# An answer waits about ten times for the interpreter, which a load holds this long at a time (bar
# its long steps). Python's default is 0.005.
_SWITCH_S = 0.001
_LOOK_S = 1.0  # between two looks at whether a thread still serves


class _Start:
    """The start of a server on a socket that listens already."""

    def __init__(
        self, settings: ServeSettings, keys: KeyTable, listener: socket.socket, teller: Teller
    ) -> None:
        self._settings, self._keys = settings, keys
        self._listener, self._teller = listener, teller
        self._hangups = Hangups(teller.say)
        self._url = url_of(settings, listener)
        self._progress = LoadingProgress(teller.say)
        self._answers = LoadingAnswers(settings, self._progress)
        self._usual_switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        teller.say(f"loading; {self._url} answers 503 until the model has passed its check")

    def serve(self, stated: Mapping[str, Any]) -> "GracefulServer":
        """Serve until a signal or the engine's end. Raises what the load raises."""
        from ropewalk.server.startup.lifecycle import GracefulServer  # noqa: PLC0415

        server = GracefulServer(
            self._settings, self._answers, lambda: server.load(lambda: self._load(server, stated))
        )
        server.run(sockets=[self._listener])
        return server

    def serve_on_ray(self) -> None:
        """Serve with a router in front of servers on Ray, until a signal ends it."""
        from ropewalk.server.ray.command import Replicas  # noqa: PLC0415  # an extra
        from ropewalk.server.startup.lifecycle import GracefulServer  # noqa: PLC0415

        started: Future[asyncio.AbstractEventLoop] = Future()
        server = GracefulServer(
            self._settings, self._answers, lambda: started.set_result(asyncio.get_running_loop())
        )
        # A signal during the start must end what has begun on Ray.
        server.serve_without_model(lambda: None)
        serving = threading.Thread(target=_run, args=(server, self._listener, started))
        serving.start()
        loop = started.result()
        replicas = Replicas(self._settings, self._listener, is_open=not self._keys.keys)
        banner = None
        # Ray's processes end with the thread that starts them, so that is the main one.
        try:
            self._progress.enter("starting the replicas")
            self._hangups.refuse("replicas do not read settings again, restart the server")
            replicas.connect()
            _handle_signals(server)  # after Ray has set its own
            banner = replicas.start(lambda: server.should_exit, self._teller.say)
            if banner is not None:
                _run_on(loop, self._begin_on_ray(server, replicas, banner), serving)
            serving.join()  # signals are handled meanwhile
        finally:
            server.should_exit = True
            serving.join()
            replicas.end(at_once=banner is None)

    async def _begin_on_ray(
        self, server: "GracefulServer", replicas: "Replicas", banner: str
    ) -> None:
        edge = replicas.edge()
        await edge.fleet.ready()
        server.door.app = edge.app
        server.serve_without_model(edge.end_requests)
        sys.setswitchinterval(self._usual_switch_s)
        self._tell_ready(banner)

    def _load(self, server: "GracefulServer", stated: Mapping[str, Any]) -> Callable[[], None]:
        """Import and load; return what begins to serve."""
        settings, progress = self._settings, self._progress
        from ropewalk.server.startup.planning.dry_run import refuse_ahead  # noqa: PLC0415

        refuse_ahead(settings, progress.enter)
        progress.enter("importing")
        from ropewalk.server.startup.app import create_app  # noqa: PLC0415
        from ropewalk.server.startup.load_service import load_service  # noqa: PLC0415
        from ropewalk.server.startup.reload import Reloader  # noqa: PLC0415

        progress.watch_compiler()
        parts = (progress.enter, progress.downloaded, self._keys)
        service, banner = load_service(settings, *parts)
        policy = access_policy_of(settings, service.key_ring, service.max_len)
        app = create_app(service, policy)

        def begin() -> None:
            sys.setswitchinterval(self._usual_switch_s)
            server.serve_model(service, app, policy.spans)
            server.reload_on(self._hangups, Reloader(stated, settings, service))
            self._tell_ready(banner)

        return begin

    def _tell_ready(self, banner: str) -> None:
        self._progress.finish()
        self._teller.ready(version_and_commit(), banner, self._url)


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
