"""Limits on the number of connections, and on the time to send a request's head.

uvicorn limits neither the number of idle connections nor the time of a request's head. A client
could therefore hold every file descriptor without sending a request.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_BODY = (
    b'{"error": {"message": "All connections are in use.", "type": "server_error", '
    b'"param": null, "code": "connections_full"}}'
)
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connection limits of one process."""

    max_connections: int
    head_timeout_s: float  # from a request's first byte, or the connection, to the end of its head
    send_timeout_s: float  # for the client to receive what has been sent


def limited_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:  # noqa: C901  # a class
    """Return uvicorn's HTTP/1.1 protocol class with these limits, for uvicorn's configuration."""

    class LimitedProtocol(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.idle_since = time.monotonic()
            self._head_timer: asyncio.TimerHandle | None = None
            self._send_timer: asyncio.TimerHandle | None = None

        @property
        def is_idle(self) -> bool:
            """Return whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections and not self._close_an_idle_one():
                transport.write(_REFUSED)
                transport.close()
                return
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.is_idle:
                self._watch_head()
            else:
                self._stop_watching()

        def on_response_complete(self) -> None:
            self.idle_since = time.monotonic()
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            # Closing would wait for unsent bytes; aborting drops them and ends the request.
            self._send_timer = self.loop.call_later(limits.send_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_send_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            self._stop_send_timer()
            super().connection_lost(exc)

        def _close_an_idle_one(self) -> bool:
            """Close the connection that has been idle longest; return False if none is idle."""
            idle = [
                each
                for each in self.connections
                if isinstance(each, LimitedProtocol) and each is not self and each.is_idle
            ]
            if idle:
                longest = min(idle, key=lambda each: each.idle_since)
                self.connections.discard(longest)
                longest.transport.abort()
            return bool(idle)

        def _watch_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_timeout_s, self._too_slow)

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

    return LimitedProtocol
