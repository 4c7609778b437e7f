"""HTTP metrics by route template: how often, with which status, how long.

The template (`/v1/models/{name}`), never the path: a client's string must not become a label.
"""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.metrics import MetricFactory

_OTHER = "other"  # paths and methods that are none of ours
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 480, 1920)


class HttpMetrics:
    """One counter and one histogram."""

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
        """A request is over; `route` is its template, None when no route matched."""
        self._requests.labels(
            method if method in _METHODS else _OTHER, route or _OTHER, str(status)
        ).inc()
        self._seconds.labels(route or _OTHER).observe(seconds)


class HttpMetricsMiddleware:
    """Sees every request and its status; plain ASGI, so that streams pass through untouched."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # what the outermost layer answers when nothing here does

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.monotonic()
        try:
            await self._app(scope, receive, note_status)
        finally:
            template = getattr(scope.get("route"), "path", None)  # the router has left it there
            self._metrics.answered(scope["method"], template, status, time.monotonic() - began)
