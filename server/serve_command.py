"""`ropewalk serve [MODEL]`: the port answers first, then everything heavy is imported."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.process.hangups import Hangups
from ropewalk.server.sentences import DIED, sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.settings.sections import SECTIONS
from ropewalk.server.startup.early_answers import EarlyAnswers
from ropewalk.server.startup.gate import bound_socket, checked, key_warnings, url_of
from ropewalk.server.startup.progress import LoadingProgress
from ropewalk.server.version import version_and_commit

if TYPE_CHECKING:
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
    with sentences() as teller:
        stated = given(flags)
        settings = load_settings(stated)
        if settings.log_format == "json":
            teller.use_json(_json_log(settings))
        # Errors of named files are reported before anything is imported.
        keys, tls = checked(settings)
        for warning in key_warnings(settings, stated):
            teller.say(warning)
        with bound_socket(settings) as listener, _ended_by_signals():
            hangups = Hangups(teller.say)
            url = url_of(settings, listener)
            progress = LoadingProgress(teller.say)
            answers = EarlyAnswers(listener, progress, settings, tls)
            answers.start()
            teller.say(f"loading; {url} answers 503 until the model has passed its check")

            def on_ready(banner: str) -> None:
                teller.ready(version_and_commit(), banner, url)

            if settings.replicas is not None:
                from ropewalk.server.ray.command import serve_on_ray  # noqa: PLC0415  # an extra

                hand_over = answers.hand_over
                serve_on_ray(settings, keys, listener, hand_over, on_ready, say=teller.say)
                return
            try:
                server = _loaded(settings, keys, progress, on_ready)
                server.reload_on(hangups, stated)
            finally:
                answers.hand_over()
            server.run(sockets=[listener])
        server.stop_engine()
    if server.has_died:
        sys.stdout.flush()
        sys.stderr.flush()
        # On a broken GPU torch's destructors may abort, which would be another code.
        os._exit(DIED)


def _loaded(
    settings: ServeSettings,
    keys: KeyTable,
    progress: LoadingProgress,
    on_ready: Callable[[str], None],
) -> "GracefulServer":
    """Import and load in a thread, and return a server that can run.

    A thread, because signals are handled between two steps of the main thread only, and loading has
    long ones. Raises what loading raises.
    """
    found: Future[GracefulServer] = Future()

    def load() -> None:
        try:
            from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415

            log_to_stderr(settings.log_format, settings.log_level)
            from ropewalk.server.startup.dry_run import refuse_ahead  # noqa: PLC0415

            refuse_ahead(settings, progress.enter)
            progress.enter("importing")
            from ropewalk.server.startup.lifecycle import loaded_server  # noqa: PLC0415

            found.set_result(loaded_server(settings, keys, progress, on_ready))
        except BaseException as error:  # noqa: BLE001  # the main thread reports it
            found.set_exception(error)

    threading.Thread(target=load, name="loader", daemon=True).start()
    return found.result()


def _json_log(settings: ServeSettings) -> Any:
    """Return a logger of JSON objects; the other formats import none before the port answers."""
    import structlog  # noqa: PLC0415

    from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415

    log_to_stderr(settings.log_format, settings.log_level)
    return structlog.get_logger(__name__)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the process at once, with code 0, on a signal while nothing is served yet.

    uvicorn handles signals while it runs.
    """

    def end(*_: object) -> None:
        sys.stderr.flush()
        os._exit(0)  # torch cannot be interrupted otherwise

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
