"""Limits on a connection: the time of a request's head, of unread bytes, and the chunks of a turn.

uvicorn limits neither the number of idle connections nor the time of a request's head. A client
could therefore hold every file descriptor without sending a request. server/middleware/acceptor.py
holds the number of connections.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import Scope

_WRITE_CHUNK = "write_chunk"  # in the state of a scope
_EVENTS_OF_A_TURN = 128  # 3 ms; a chunk is an event, and a read may hold 40,000 chunks


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connection limits of one process."""

    max_connections: int
    head_timeout_s: float  # from a request's first byte, or the connection, to the end of its head
    send_timeout_s: float  # for the client to receive what has been sent


class _Turns:
    """Callbacks that each run in a turn of the event loop of their own, one after the other."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, callback: Callable[[], None]) -> None:
        """Run a callback after those that wait already."""
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        callback = self._waiting[0]
        try:
            callback()  # it may add itself again
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run)


@dataclass(slots=True)
class OpenConnections:
    """The state that the connections of one process share."""

    limits: ConnectionLimits
    # In the order in which they became idle: no request is being answered.
    idle: dict["LimitedProtocol", None] = field(default_factory=dict)
    turns: _Turns = field(default_factory=_Turns)

    def became_idle(self, connection: "LimitedProtocol") -> None:
        self.idle.pop(connection, None)
        self.idle[connection] = None

    def abort_idle(self, most: int) -> int:
        """Close up to `most` connections, those that have been idle longest first.

        Their descriptors are free in the next turn of the loop. Returns their number.
        """
        longest = [each for each, _ in zip(self.idle, range(most), strict=False)]
        for each in longest:
            del self.idle[each]
            each.transport.abort()
        return len(longest)


class _PatientConnection(h11.Connection):
    """A connection that gives up to so many events, and then acts as if more bytes were needed."""

    events_left = _EVENTS_OF_A_TURN

    def next_event(self) -> Any:
        """Return the next event, or NEED_DATA in the midst of data if the turn is over."""
        if self.events_left <= 0:
            return h11.NEED_DATA
        self.events_left -= 1
        return super().next_event()


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol within the limits of `shared`."""

    conn: _PatientConnection

    def __init__(self, *args: Any, shared: OpenConnections, **options: Any) -> None:
        super().__init__(*args, **options)
        most = self.config.h11_max_incomplete_event_size
        assert most is not None, "max_header_bytes"
        self.conn = _PatientConnection(h11.SERVER, most)
        self.app_state = {**self.app_state, _WRITE_CHUNK: self.write_chunk}
        self.on_lost: Callable[[], None] | None = None
        self._shared = shared
        self._has_turn = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._shared.became_idle(self)
        self._watch_head()

    def handle_events(self) -> None:
        """Handle the events of one turn, and let the rest of what has arrived wait for another."""
        self.conn.events_left = _EVENTS_OF_A_TURN
        super().handle_events()
        if self.is_idle:
            self._watch_head()
        else:
            self._shared.idle.pop(self, None)
            self._stop_watching()
        if self.conn.events_left <= 0:
            self.transport.pause_reading()
            if not self._has_turn:
                self._has_turn = True
                self._shared.turns.add(self._go_on)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, unless an answer has begun, and close."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still sends goes nowhere
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
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
        if self.cycle is not None and self.cycle.response_started and not self.is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.close()

    def on_response_complete(self) -> None:
        """Become idle, or go on with a request that has arrived meanwhile."""
        super().on_response_complete()
        if self.is_idle and not self.transport.is_closing():
            self._shared.became_idle(self)

    def pause_writing(self) -> None:
        """Limit the time in which the client reads nothing."""
        super().pause_writing()
        # Closing would wait for unsent bytes; aborting drops them and ends the request.
        seconds = self._shared.limits.send_timeout_s
        self._send_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """End the limit: the client reads."""
        super().resume_writing()
        self._stop_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, whose descriptor is closed right after."""
        self._shared.idle.pop(self, None)
        self._stop_watching()
        self._stop_send_timer()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def _go_on(self) -> None:
        """Handle more events, and read again when none is left."""
        self._has_turn = False
        if self.transport.is_closing():
            return
        self.handle_events()
        if not self._has_turn and not self.flow.read_paused:
            self.transport.resume_reading()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            seconds = self._shared.limits.head_timeout_s
            self._head_timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.is_idle:
            self.transport.close()


def chunk_writer(scope: "Scope") -> Callable[[bytes], Awaitable[None]] | None:
    """Return `write_chunk` of the request's connection; None if another server has it."""
    found: Callable[[bytes], Awaitable[None]] | None = scope.get("state", {}).get(_WRITE_CHUNK)
    return found
