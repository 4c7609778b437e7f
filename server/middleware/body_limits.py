"""Limits of a body that need no schema: bytes, depth and the time to arrive."""

import asyncio
import re
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.envelope import envelope

# Strings are skipped whole, so that a bracket inside one does not count.
# Possessive, because the regex engine would otherwise store every character for backtracking.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_SMALL = 65536  # bytes; a larger body's depth is counted in a thread


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a request's body."""

    max_bytes: int = 8 * 2**20
    max_depth: int = 64
    timeout_s: float = 60.0  # for the whole body


class _RefusedError(Exception):
    """A request that is refused before the application reads it."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BodyLimitsMiddleware:
    """Middleware that reads the body, within limits, before the application receives it."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(receive)
        except _RefusedError as error:
            answer = JSONResponse(
                envelope(str(error), "invalid_request_error", code=error.code),
                error.status,
                # Bytes that arrive later would be read as the next request.
                {"Connection": "close"},
            )
            await answer(scope, receive, send)
            return
        if body is None:
            return  # the client disconnected
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        limits = self._limits
        body = bytearray()
        try:
            async with asyncio.timeout(limits.timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > limits.max_bytes:
                        raise _RefusedError(
                            413,
                            f"The body must be at most {limits.max_bytes} bytes (max_body_bytes).",
                            "body_too_large",
                        )
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise _RefusedError(
                408,
                f"The body did not arrive within {limits.timeout_s:g} s (body_timeout_seconds).",
                "body_timeout",
            ) from None
        whole = bytes(body)
        is_deep = (
            is_too_deep(whole, limits.max_depth)
            if len(whole) <= _SMALL
            else (await asyncio.to_thread(is_too_deep, whole, limits.max_depth))
        )
        if is_deep:
            raise _RefusedError(
                400,
                f"The body must be nested at most {limits.max_depth} deep (max_json_depth).",
                "body_too_deep",
            )
        return whole


def is_too_deep(body: bytes, most: int) -> bool:
    """Return whether brackets and braces are nested deeper than `most`."""
    depth = 0
    for found in _STRUCTURE.finditer(body):
        first = found[0][:1]
        if first in b"[{":
            depth += 1
            if depth > most:
                return True
        elif first in b"]}":
            depth -= 1
    return False
