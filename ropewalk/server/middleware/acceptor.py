"""Accepts connections, never more than the limit, and few in a turn of the event loop.

asyncio's own server accepts up to 2,048 in one turn, before any of them can be closed.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from ropewalk.server.middleware.connections import LimitedProtocol, OpenConnections

_AT_ONCE = 32  # connections that are accepted, or closed for others, in a turn
_SHORT_OF_FILES_S = 0.1
_BODY = (
    b'{"error": {"message": "All connections are in use.", "type": "server_error", '
    b'"param": null, "code": "connections_full"}}'
)
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Acceptor:
    """A server over one listening socket, in the place of asyncio's; uvicorn closes it."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], LimitedProtocol],
        shared: OpenConnections,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Accept from now on, on the event loop. The socket listens, and the caller closes it."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._shared = shared
        self._tls = tls
        self._open: set[LimitedProtocol] = set()  # each has a descriptor
        # Those of TLS that have not agreed on a key yet, oldest first.
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._num_to_close = 1  # it doubles while more connections wait than there is room for
        self._is_closed = False
        listener.setblocking(False)  # noqa: FBT003  # its only argument
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no further connection; those that are open stay so."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once: nothing runs after `close`."""

    def _accept(self) -> None:
        """Accept the connections that wait, or make room for them."""
        room = self._shared.limits.max_connections - len(self._open)
        for _ in range(min(room, _AT_ONCE)):
            accepted = self._next()
            if accepted is None:
                self._num_to_close = 1
                return
            self._begin(accepted)
        if room > 0:
            return  # the loop calls again if more wait
        if self._make_room(self._num_to_close):
            self._num_to_close = min(2 * self._num_to_close, _AT_ONCE)
            return  # the descriptors are free in the next turn
        for _ in range(_AT_ONCE):
            accepted = self._next()
            if accepted is None:
                return
            self._refuse(accepted)

    def _next(self) -> socket.socket | None:
        """Return the next connection that waits, or None."""
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None
        except OSError:  # no file descriptor is left
            self._make_room(_AT_ONCE)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_SHORT_OF_FILES_S, self._accept_again)
            return None
        accepted.setblocking(False)  # noqa: FBT003  # its only argument
        return accepted

    def _accept_again(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _begin(self, accepted: socket.socket) -> None:
        """Give a connection to a protocol of its own."""
        protocol = self._make_protocol()
        self._open.add(protocol)
        protocol.on_lost = lambda: self._open.discard(protocol)
        task = self._loop.create_task(self._connect(protocol, accepted))
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect(self, protocol: LimitedProtocol, accepted: socket.socket) -> None:
        seconds = None if self._tls is None else self._shared.limits.head_timeout_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except (OSError, TimeoutError, asyncio.CancelledError):
            # It is no client of TLS, it was too slow, or it had to make room.
            accepted.close()
            self._open.discard(protocol)

    def _make_room(self, most: int) -> int:
        """Close idle connections, or those that have not said anything; return their number."""
        closed = self._shared.abort_idle(most)
        if closed == 0 and self._tls is not None:
            for task, _ in zip(list(self._handshakes), range(most), strict=False):
                task.cancel()
                closed += 1
        return closed

    def _refuse(self, accepted: socket.socket) -> None:
        """Answer a connection that has no place, and close it at once."""
        with accepted, suppress(OSError):
            if self._tls is None:
                with suppress(BlockingIOError):
                    accepted.recv(1 << 16)  # a close with unread bytes would take the answer back
                accepted.send(_REFUSED)
