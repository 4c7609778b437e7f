"""The application that uvicorn runs, which also answers while the process drains.

It imports nothing heavy, because it stands before the answers of a load, too.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ropewalk.server.envelope import envelope

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DRAINING = envelope("The server is ending.", "server_error", code="draining")
DRAINING_HEADERS = {"Retry-After": "1", "Connection": "close"}
# Passed to their routes during the drain, too. They are not counted as in-flight requests.
_ALWAYS = frozenset({"/live", "/health", "/ready", "/metrics", "/version"})


class AvailabilityGate:
    """A gate before the application that counts the in-flight requests."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app  # may be set anew between two requests
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

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if self._is_draining and path not in _ALWAYS:
            await _refuse(send)
            return
        scope.setdefault("state", {})["is_draining"] = self._is_draining
        has_started = False

        async def noting_send(message: "Message") -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        self._count(path, 1)
        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            # The process ends at once (a second signal). uvicorn would log a traceback.
            if not has_started:
                await _refuse(send)
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


async def _refuse(send: "Send") -> None:
    """Send the answer of a process that ends."""
    content = json.dumps(DRAINING, separators=(",", ":")).encode()
    await send_whole(send, 503, {**DRAINING_HEADERS, "Content-Type": "application/json"}, content)


async def send_whole(
    send: "Send", status: int, headers: Mapping[str, str], content: bytes, *, is_end: bool = True
) -> None:
    """Send an answer; without `is_end`, an empty part of the body still has to follow."""
    named = {**headers, "Content-Length": str(len(content))}
    raw = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": not is_end})
