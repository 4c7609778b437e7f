"""A router as one piece: its fleet, and the application in front of it."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ropewalk.server.middleware.host_check import HostCheckMiddleware
from ropewalk.server.router.app import RouterApp
from ropewalk.server.router.fleet.fleet import Fleet
from ropewalk.server.router.route_metrics import RouteMetrics
from ropewalk.server.router.upstream import Target
from ropewalk.server.settings.route_settings import RouteSettings
from ropewalk.server.startup.gate import allowed_hosts_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class Edge:
    """The application of a router over its fleet. Make it on the event loop."""

    def __init__(self, settings: RouteSettings, *, is_open: bool) -> None:
        """`is_open`: whether hosts are checked though none is named."""
        self.fleet = Fleet(settings)
        # The servers see the router's own Host header, so their checks would find nothing.
        hosts = allowed_hosts_of(settings, is_open=is_open)
        app = RouterApp(settings, self.fleet, RouteMetrics())
        self.app: ASGIApp = app if hosts is None else HostCheckMiddleware(app, hosts)
        self.end_requests = app.end_requests
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.ensure_future(self.fleet.run())

    def set_servers(self, urls: Iterable[str]) -> None:
        """Let these servers take requests, beside those of the settings. For any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.fleet.tell, [Target.of(url) for url in urls])
