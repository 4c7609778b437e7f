"""`ropewalk route ADDRESS ...`: a router in front of servers."""

import asyncio
import signal
from typing import Any

import click

from ropewalk.server.process.certificate import check_certificate
from ropewalk.server.process.hangups import Hangups, end_process
from ropewalk.server.sentences import DIED, sentences
from ropewalk.server.settings.flags import given, with_flags
from ropewalk.server.settings.request_sections import is_loopback
from ropewalk.server.settings.route_settings import (
    ROUTE_SECTIONS,
    RouteSettings,
    load_route_settings,
)
from ropewalk.server.startup.gate import (
    listening_socket,
    url_of,
)
from ropewalk.server.version import version_and_commit
from ropewalk.server.wording import HelpCommand


class _RouteCommand(HelpCommand):
    """A command whose help has its flags under headings."""


@click.command(cls=_RouteCommand)
@click.argument("servers", nargs=-1)
@with_flags(*ROUTE_SECTIONS, without={"servers"})
def route(servers: tuple[str, ...], **flags: Any) -> None:
    """Pass requests on to the servers at ADDRESSES, and continue answers that lose one.

    Each of them is a `ropewalk serve` process, and all serve the same. Every flag is also an
    environment variable, named in brackets, and a key of the YAML file. For ADDRESSES they are
    ROPEWALK_SERVERS and `servers`.
    """
    import structlog  # noqa: PLC0415  # the help of this command needs none

    from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415

    with sentences() as teller:
        stated = given(flags)
        if servers:
            stated["servers"] = servers
        settings = load_route_settings(stated)
        log_to_stderr(settings.log_format, settings.log_level)
        if settings.log_format == "json":
            teller.use_json(structlog.get_logger(__name__))
        check_certificate(settings)
        with listening_socket(settings) as listener:
            banner = _banner(settings)
            url = url_of(settings, listener)
            has_died = _serve(
                settings,
                listener,
                lambda: teller.ready(version_and_commit(), banner, url),
                Hangups(teller.say),
            )
    if has_died:
        end_process(DIED)


def _banner(settings: RouteSettings) -> str:
    is_exact = settings.router_key is not None and settings.continue_attempts > 0
    kept = "go on elsewhere to the same bytes" if is_exact else "end with an error"
    why = "" if settings.router_key is not None else " (no router_key)"
    lines = {
        "servers": ", ".join(settings.servers),
        "routing": settings.routing,
        "lost streams": f"{kept}{why}",
    }
    return "\n".join(f"  {name:<17}{value}" for name, value in lines.items())


def _serve(settings: RouteSettings, listener: Any, say_ready: Any, hangups: Hangups) -> bool:
    """Serve until signals end it; return whether a second one cut answers off."""
    from ropewalk.server.router.edge import Edge  # noqa: PLC0415
    from ropewalk.server.startup.lifecycle import GracefulServer  # noqa: PLC0415

    async def refuse(*_: object) -> None:
        raise AssertionError("it accepts nothing before it has started")

    def begin() -> None:
        edge = Edge(settings, is_open=is_loopback(settings.host))
        server.door.app = edge.app
        server.serve_without_model(edge.end_requests)
        hangups.connect(
            asyncio.get_running_loop(),
            lambda: None,
            lambda: server.handle_exit(signal.SIGHUP, None),
        )
        say_ready()

    server = GracefulServer(settings, refuse, begin)
    server.run(sockets=[listener])
    return server.has_died
