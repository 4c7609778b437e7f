"""The application that uvicorn runs, which also answers while the process drains.

server/startup/early_answers.py answers while the model loads.
"""

import asyncio

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.server.envelope import envelope

_RETRY_DRAINING_S = 1
# Passed to their routes during the drain, too. They are not counted as in-flight requests.
_ALWAYS = frozenset({"/live", "/health", "/ready", "/metrics", "/version"})


class AvailabilityGate:
    """A gate before the application that counts the in-flight requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_draining = False
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_running(self) -> int:
        """Return the number of in-flight requests, health checks and metrics not counted."""
        return self._num_inside

    async def drain(self, limit_s: float) -> bool:
        """Refuse new requests; return True if all in-flight ones end within `limit_s` seconds."""
        self._is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if self._is_draining and path not in _ALWAYS:
            await draining()(scope, receive, send)
            return
        scope.setdefault("state", {})["is_draining"] = self._is_draining
        has_started = False

        async def noting_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        self._count(path, 1)
        try:
            await self._app(scope, receive, noting_send)
        except asyncio.CancelledError:
            # The process ends at once (a second signal). uvicorn would log a traceback.
            if not has_started:
                await draining()(scope, receive, send)
        finally:
            self._count(path, -1)

    def _count(self, path: str, change: int) -> None:
        if path in _ALWAYS:
            return
        self._num_inside += change
        if self._num_inside:
            self._is_empty.clear()
        else:
            self._is_empty.set()


def draining() -> JSONResponse:
    """Return the answer of a process that ends."""
    headers = {"Retry-After": str(_RETRY_DRAINING_S), "Connection": "close"}
    body = envelope("The server is ending.", "server_error", code="draining")
    return JSONResponse(body, 503, headers)
