"""HTTP metrics by route template: request count, status and duration.

The label is the template (`/v1/models/{name}`), never the path, because a client's string must not
become a label.
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.server.access.access_log import RequestOpener
from ropewalk.server.metrics import MetricFactory

_OTHER = "other"  # the label of unknown paths and methods
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 480, 1920)


class HttpMetrics:
    """A counter and a histogram of HTTP requests."""

    def __init__(self, factory: MetricFactory) -> None:
        self._requests = factory.counter(
            "ropewalk_http_requests",
            "HTTP requests answered, by route template and status.",
            ["method", "route", "status"],
        )
        self._seconds = factory.histogram(
            "ropewalk_http_request_duration_seconds",
            "From the first byte of a request to the last of its answer, streams included.",
            ["route"],
            _SECONDS,
        )

    def answered(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Record a finished request; `route` is its template, or None if no route matched."""
        self._requests.labels(
            method if method in _METHODS else _OTHER, route or _OTHER, str(status)
        ).inc()
        self._seconds.labels(route or _OTHER).observe(seconds)


class HttpMetricsMiddleware:
    """Plain ASGI middleware that records every request and leaves streams unchanged."""

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, opener: RequestOpener | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._opener = opener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, has_started = 500, False  # what the outermost layer answers to an exception

        async def note_status(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
            await send(message)

        began = time.monotonic()
        opened = None if self._opener is None else self._opener.opened(scope)
        try:
            await self._app(scope, receive, note_status)
        except asyncio.CancelledError:  # the process ends at once (availability.py)
            status = status if has_started else 503
            if opened is not None:
                opened.is_aborted = True
            raise
        finally:
            template = getattr(scope.get("route"), "path", None)  # set by the router
            seconds = time.monotonic() - began
            self._metrics.answered(scope["method"], template, status, seconds)
            if opened is not None:
                opened.answered(status, seconds)
