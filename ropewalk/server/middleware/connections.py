"""uvicorn's HTTP/1.1 protocol, past which a stream sends the chunks of its answer."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import Scope

_WRITE_CHUNK = "write_chunk"  # in the state of a scope


class ChunkProtocol(H11Protocol):
    """A connection whose requests find `write_chunk` in their scope."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app_state = {**self.app_state, _WRITE_CHUNK: self.write_chunk}

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, unless an answer has begun, and close."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still sends goes nowhere
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:  # h11 would raise
            self.transport.close()

    async def write_chunk(self, data: bytes) -> None:
        """Send a piece of an answer's body, of which the head has been sent, past uvicorn and h11.

        The answer must be to no HEAD, and its head must have no Content-Length. h11 then counts no
        bytes of the body, so it needs to see the head and the end only. `data` is not empty.
        """
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if self.cycle.disconnected:
            return
        version = self.conn.their_http_version
        is_chunked = version is not None and version >= b"1.1"  # h11's rule
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def cut_off(self) -> None:
        """Close in the midst of an answer that has begun; what is sent already still arrives."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.close()


def chunk_writer(scope: "Scope") -> Callable[[bytes], Awaitable[None]] | None:
    """Return `write_chunk` of the request's connection; None if another server has it."""
    found: Callable[[bytes], Awaitable[None]] | None = scope.get("state", {}).get(_WRITE_CHUNK)
    return found
