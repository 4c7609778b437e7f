"""The `ropewalk` command: serve, inspect, config check, bench, eval.

Modules that import transformers are imported inside the functions that use them. That import takes
seconds, and `--help`, `bench` and a wrong setting do not need it.
"""
# ruff: noqa: PLC0415

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from model_runtime.errors import ModelError
from server.bench.command import bench
from server.evaluation.command import evaluate
from server.log_lines import log_to_stderr
from server.settings.flags import SettingsCommand, given, with_flags
from server.settings.load import TRACEBACK_VARIABLE, ServeSettings, SettingsError, load_settings
from server.settings.sections import SECTIONS, DeploymentSettings, ModelSettings, SourceSettings
from server.version import own_version

_USAGE_ERROR, _DIED = 2, 1


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(own_version(), prog_name="ropewalk")
def ropewalk() -> None:
    """Serve language models past their trained length, each request on the rotation that fits."""
    log_to_stderr()


ropewalk.add_command(bench)
ropewalk.add_command(evaluate)


@ropewalk.command(cls=SettingsCommand)
@click.argument("model", required=False)
@with_flags(*SECTIONS)
def serve(**flags: Any) -> None:
    """Serve MODEL, a folder or a hub id; without one, the embedded demonstration model.

    OpenAI's routes are under /v1, metrics under /metrics. Every flag is also an environment
    variable, named in brackets, and a key of the YAML file. For MODEL they are ROPEWALK_MODEL and
    `model`. A flag overrides the variable, and a variable overrides the file.
    """
    with _sentences(), ExitStack() as stack:
        settings = load_settings(given(flags))
        from server.startup.gate import access_policy_of
        from server.startup.lifecycle import GracefulServer

        access_policy_of(settings)  # its errors are reported before anything is loaded
        listener = stack.enter_context(_bound_socket(settings))
        host, port = listener.getsockname()[:2]
        scheme = "http" if settings.ssl_certfile is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

        def on_ready(banner: str) -> None:
            click.echo(f"ropewalk {own_version()}\n{banner}", err=True)
            click.echo(f"  listening on     {url}", err=True)

        server = GracefulServer(settings, on_ready)
        click.echo(f"loading; {url} answers 503 until the model has passed its check", err=True)
        server.run(sockets=[listener])
        if server.is_loading:
            os._exit(_DIED if server.has_died else 0)  # torch cannot be interrupted otherwise
        server.stop_engine()
        if server.failure is not None:
            raise server.failure
    if server.has_died:
        sys.exit(_DIED)


@ropewalk.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory for weights and cache together. The report then states the longest context that "
    "fits. The exit code is 2 if none does.",
)
@click.option(
    "--heads",
    metavar="LAYERS",
    help="Layers whose attention heads are measured on a sample text: all, or numbers such as 0,5. "
    "The weights are loaded for it.",
)
@click.option(
    "--sample-text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Sample text for --heads. Default: files of Python's standard library that the embedded "
    "model was not trained on.",
)
@click.option(
    "--sample-tokens",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Most tokens of the sample text.  [default: 2048]",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of attention against distance, .png or .svg. Needs matplotlib: "
    "pip install 'ropewalk[plot]'.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@with_flags(SourceSettings, ModelSettings, DeploymentSettings)
def inspect(
    memory_gib: float | None,
    heads: str | None,
    sample_text: Path | None,
    sample_tokens: int | None,
    plot_path: Path | None,
    *,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show MODEL's tables tier by tier, what a context costs, and attention by distance.

    A tier is a context length with a rotation table of its own. The report has a row for each pair
    of rotated dimensions: its wavelength in tokens, and whether the tier keeps, blends or
    interpolates it. An upper bound of attention against distance follows, with and without scaling.
    The weights are loaded for --heads only. The settings are those of `serve`.
    """
    with _sentences():
        settings = load_settings(given(flags))
        from server.inspection.heads import heads_options
        from server.inspection.report import InspectOptions, inspect_model

        wanted = heads_options(heads, sample_text, sample_tokens)
        options = InspectOptions(memory_gib, wanted, plot_path, as_json)
        report = inspect_model(settings, options)
        click.echo(report.text)
        if report.problem is not None:
            raise SettingsError(report.problem)


@ropewalk.group()
def config() -> None:
    """Look at a configuration file."""


@config.command(cls=SettingsCommand)
@click.argument("file")
def check(file: str) -> None:
    """Show what `ropewalk serve --config FILE` would serve here, without loading weights.

    The output lists deployments, tiers, the longest context and memory. Variables of the
    environment override the file. If the server would refuse to start, the exit code is 2, and a
    sentence gives the reason.
    """
    with _sentences():
        settings = load_settings({"config": file})
        from server.startup.dry_run import outlook_lines, outlook_of

        click.echo("\n".join(outlook_lines(settings, outlook_of(settings))))


@contextmanager
def _sentences() -> Iterator[None]:
    """End the command with code 2 and a line for each mistake if something cannot be served.

    An unexpected error is also printed as a sentence, and ends it with code 1. If
    ROPEWALK_TRACEBACK is set, both are followed by the traceback.
    """
    try:
        yield
    except (ModelError, SettingsError) as error:
        for line in str(error).splitlines():
            click.echo(f"ropewalk: {line}", err=True)
        _tell_traceback()
        sys.exit(_USAGE_ERROR)
    except click.exceptions.ClickException:
        raise
    except Exception as error:  # noqa: BLE001  # an error in the program itself
        first_line = str(error).strip().partition("\n")[0]
        click.echo(f"ropewalk: unexpected {type(error).__name__}: {first_line}", err=True)
        if not _tell_traceback():
            click.echo(f"ropewalk: set {TRACEBACK_VARIABLE}=1 to see where it came from", err=True)
        sys.exit(_DIED)


def _tell_traceback() -> bool:
    """Print the traceback of the error being handled, if the operator has enabled that."""
    is_asked = bool(os.environ.get(TRACEBACK_VARIABLE))
    if is_asked:
        click.echo(traceback.format_exc(), err=True)
    return is_asked


def _bound_socket(settings: ServeSettings) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises SettingsError."""
    try:
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = addresses[0]
        # The protocol is explicit, because asyncio turns Nagle's delay off only for sockets with
        # TCP as their protocol. With the delay, a token waits up to 40 ms for the client's
        # acknowledgement.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on host {settings.host}, port {settings.port}: {error.strerror}"
        ) from error
    return listener
