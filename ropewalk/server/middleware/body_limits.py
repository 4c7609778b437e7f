"""Limits of a body that need no schema: bytes, depth, values and the time to arrive."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.server.envelope import envelope
from ropewalk.server.middleware.large_bodies import LARGE, JsonShape, LargeBodies, LargeBody

_LINGER_S = 2.0  # for a client to send the rest of a refused body; a close would reset it before

_MAX_CODING = 64  # characters of a header that are shown
# Routes whose bodies are mostly a prompt. Few texts have more bytes of JSON a token.
_OF_PROMPTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_MOST_BYTES_OF_A_TOKEN = 16


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a request's body, and of all bodies together."""

    max_bytes: int = 8 * 2**20
    max_depth: int = 64
    max_values: int = 131_072
    max_numbers: int = 2**20
    max_total_bytes: int = 256 * 2**20
    timeout_s: float = 60.0  # for the whole body
    max_len: int = 0  # tokens of the longest context

    def too_large(self, path: str) -> "_RefusedError":
        """Return the refusal of a body of more than `max_bytes`.

        A prompt that cannot fit the context gets the code by which clients shorten conversations.
        """
        is_prompt = path.rstrip("/") in _OF_PROMPTS
        if is_prompt and 0 < self.max_len * _MOST_BYTES_OF_A_TOKEN <= self.max_bytes:
            told = (
                f"The prompt exceeds the longest context of {self.max_len} tokens: "
                f"the body has more than {self.max_bytes} bytes (max_body_bytes)."
            )
            return _RefusedError(400, told, "context_length_exceeded")
        told = f"The body must be at most {self.max_bytes} bytes (max_body_bytes)."
        return _RefusedError(413, told, "body_too_large")


class _RefusedError(Exception):
    """A request that is refused before the application reads it."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BodyLimitsMiddleware:
    """Middleware that reads the body, within limits, before the application receives it.

    A large body is in the scope's state as `large_body`, for a route that parses it in a thread.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits
        self._bodies = LargeBodies(limits.max_total_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arriving = _Arriving(self._limits, self._bodies, scope["path"])
        try:
            if not await self._has_arrived(arriving, Headers(scope=scope), receive):
                return  # the client disconnected
            await self._app(scope, arriving.received_again(scope, receive), send)
        except _RefusedError as error:
            arriving.release()
            await _refuse(error, scope, receive, send, is_whole=arriving.is_whole)
        finally:
            arriving.release()

    async def _has_arrived(self, arriving: "_Arriving", headers: Headers, receive: Receive) -> bool:
        """Receive the whole body and check it; return False if the client disconnected."""
        limits = self._limits
        _check_coding(headers)
        with suppress(ValueError):  # the protocol has refused a length that is none
            arriving.check_size(int(headers.get("content-length", "0")))
        try:
            async with asyncio.timeout(limits.timeout_s):
                while not arriving.is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    arriving.append(message)
        except TimeoutError:
            raise _RefusedError(
                408,
                f"The body did not arrive within {limits.timeout_s:g} s.",
                "body_timeout",
            ) from None
        await arriving.check_shape()
        return True


class _Arriving:
    """A body while it arrives."""

    def __init__(self, limits: BodyLimits, bodies: LargeBodies, path: str) -> None:
        self._limits = limits
        self._path = path
        self._bodies = bodies
        self._small = bytearray()
        self.large: LargeBody | None = None
        self.is_whole = False

    def check_size(self, size: int) -> None:
        """Raise _RefusedError if a body of so many bytes is too large."""
        if size > self._limits.max_bytes:
            raise self._limits.too_large(self._path)

    def append(self, message: Message) -> None:
        """Add the bytes of a message. Raises _RefusedError."""
        self.is_whole = not message.get("more_body", False)
        piece = message.get("body", b"")
        size = len(self._small) if self.large is None else self.large.size
        self.check_size(size + len(piece))
        if self.large is None and size + len(piece) > LARGE:
            try:
                self.large = LargeBody(self._bodies, self._limits.max_bytes)
            except OSError as error:  # a system that counts mapped memory before it is used
                raise self._full() from error
            piece = bytes(self._small) + piece
            self._small.clear()
        if self.large is None:
            self._small += piece
        elif not self.large.append(piece):
            raise self._full()

    def _full(self) -> _RefusedError:
        told = (
            f"The bodies of all requests are more than {self._limits.max_total_bytes} bytes. Send "
            "it again later."
        )
        return _RefusedError(503, told, "bodies_full")

    async def check_shape(self) -> None:
        """Raise _RefusedError if the whole body is nested too deep or has too many values."""
        limits = self._limits
        shape = JsonShape(limits.max_depth, limits.max_values, limits.max_numbers)
        if self.large is None:
            exceeded = shape.exceeds(bytes(self._small), len(self._small))
        else:
            exceeded = await self.large.run(shape.exceeds)
        if exceeded == "depth":
            told = f"The body must be nested at most {limits.max_depth} deep."
            raise _RefusedError(400, told, "body_too_deep")
        if exceeded == "values":
            told = f"The body must have at most {limits.max_values} values."
            raise _RefusedError(400, told, "too_many_values")
        if exceeded == "numbers":
            told = f"The body must have at most {limits.max_numbers} numbers, by its commas."
            raise _RefusedError(400, told, "too_many_values")

    def release(self) -> None:
        """Give the memory of a large body back; a refused one has no further use."""
        if self.large is not None:
            self.large.release()

    def received_again(self, scope: Scope, receive: Receive) -> Receive:
        """Return the application's `receive`, which begins with the whole body."""
        is_pending = True
        if self.large is not None:
            scope.setdefault("state", {})["large_body"] = self.large

        async def receive_again() -> Message:
            nonlocal is_pending
            if not is_pending:
                return await receive()
            is_pending = False
            body = bytes(self._small) if self.large is None else self.large.content()
            self._small.clear()
            return {"type": "http.request", "body": body, "more_body": False}

        return receive_again


def _check_coding(headers: Headers) -> None:
    """Raise _RefusedError for a body that is compressed."""
    if not {"content-length", "transfer-encoding"} & set(headers.keys()):
        return  # there is no body
    for coding in (each.strip() for each in headers.getlist("content-encoding")):
        if coding.lower() in {"", "identity"}:
            continue
        told = (
            f"The header Content-Encoding must be identity, or left out: send the body without "
            f"compression. Given: {coding[:_MAX_CODING]!a}."
        )
        raise _RefusedError(415, told, "compressed_body")


async def _refuse(
    error: _RefusedError, scope: Scope, receive: Receive, send: Send, *, is_whole: bool
) -> None:
    """Answer, and then drop what still arrives for a while, so that the client gets the answer."""
    # Bytes that arrive later would be read as the next request.
    headers = {"Connection": "close"}
    if error.status == 503:
        headers["Retry-After"] = "1"
    kind = "server_error" if error.status == 503 else "invalid_request_error"
    body = envelope(str(error), kind, code=error.code)
    answer = JSONResponse(body, error.status, headers)
    if is_whole:
        await answer(scope, receive, send)
        return
    start = {"type": "http.response.start", "status": error.status, "headers": answer.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] != "http.disconnect":
                if not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
