"""Flags, made from the settings: `ropewalk serve [MODEL] --flag value`."""

import logging
import socket
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import click
import structlog
import uvicorn

from model_runtime.errors import ModelError
from server.app import create_app
from server.load_service import load_service
from server.settings import ServeSettings, SettingsError, load_settings

_USAGE_ERROR, _ENGINE_DIED = 2, 1
_SHUTDOWN_S = 30  # what is running may finish for so long


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("ropewalk"), prog_name="ropewalk")
def ropewalk() -> None:
    """Serve language models past their trained length, each request on the rotation that fits."""


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """One flag per setting, in the order of the settings."""
    for name, field in reversed(ServeSettings.model_fields.items()):
        if name == "model":
            continue
        text = f"{field.description}  [ROPEWALK_{name.upper()}]"
        if field.default is not None:
            text += f"  [default: {field.default}]"
        flag = f"--{name.replace('_', '-')}"
        is_switch = field.annotation is bool
        option = (
            click.option(flag, name, is_flag=True, default=None, help=text)
            if is_switch
            else click.option(flag, name, metavar="VALUE", help=text)
        )
        command = option(command)
    return command


@ropewalk.command()
@click.argument("model", required=False)
@_with_flags
def serve(**flags: Any) -> None:
    """Serve MODEL, a folder or a hub id; without one, the embedded demonstration model.

    Every flag is also an environment variable, named in brackets; flags win.
    """
    _log_to_stderr()
    try:
        settings = load_settings(
            {name: value for name, value in flags.items() if value is not None}
        )
        listener = _bound_socket(settings)  # before the weights, which may take minutes
        service, banner = load_service(settings)
    except (ModelError, SettingsError) as error:
        for line in str(error).splitlines():
            click.echo(f"ropewalk: {line}", err=True)
        sys.exit(_USAGE_ERROR)
    host, port = listener.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host

    def on_ready() -> None:
        click.echo(f"ropewalk {version('ropewalk')}\n{banner}", err=True)
        click.echo(f"  listening on     http://{shown_host}:{port}", err=True)

    def on_death() -> None:
        dead.set()
        server.should_exit = True

    dead = threading.Event()
    app = create_app(service, on_ready, on_death)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    if dead.is_set():
        sys.exit(_ENGINE_DIED)


def _bound_socket(settings: ServeSettings) -> socket.socket:
    """Bound, not listening yet. Raises SettingsError."""
    try:
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = addresses[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on host {settings.host}, port {settings.port}: {error.strerror}"
        ) from error
    return listener


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
