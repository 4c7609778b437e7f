"""HTTP/1.1 to a server: one request at a time on a connection, bytes as they come.

A client library takes as long for a chunk as the server for a token. This one wakes a reader when
bytes have come, and has no more.
"""

import asyncio
import ipaddress
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import h11

from ropewalk.server.router.body_parser import BodyParser, FramingError

_CONNECT_S = 5.0
_MOST_UNREAD = 1 << 20  # bytes; then the server waits, as it would for a slow client
_MOST_IDLE = 64  # connections that are kept to a server
_MAX_HEAD_BYTES = 1 << 16
_LEAST_SILENCE_S = 10.0  # a busy server may take no bytes for a while

Headers = Sequence[tuple[bytes, bytes]]


class LostError(Exception):
    """The connection to a server is gone; the message says why."""

    def __init__(self, why: str, *, is_unsent: bool = False) -> None:
        super().__init__(why)
        self.is_unsent = is_unsent  # the server has not seen the request


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server."""

    host: str  # a number
    port: int
    name: str  # for the Host header, with the port
    tls_name: str | None = None  # for the certificate; None: no TLS

    @classmethod
    def of(cls, url: str) -> "Target":
        """Return the target of an address whose host is a number."""
        parts = urlsplit(url)
        return cls(str(parts.hostname), int(parts.port or 80), parts.netloc)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'' if self.tls_name is None else 's'}://{host}:{self.port}"


async def targets_of(address: str) -> list[Target]:
    """Return the targets of an address, whose name may stand for several.

    Raises OSError or UnicodeError if its name has none.
    """
    parts = urlsplit(address)
    host, is_tls = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    hosts = [host]
    if not _is_number(host):
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Both families of one machine would be two servers.
        families = {entry[0] for entry in entries}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        hosts = sorted(str(entry[4][0]) for entry in entries if entry[0] == family)
    shown = (f"[{each}]" if ":" in each else each for each in hosts)
    return [
        Target(each, port, f"{name}:{port}", host if is_tls else None)
        for each, name in zip(hosts, shown, strict=True)
    ]


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Exchange(asyncio.Protocol):
    """A connection, and the answer to the request that was sent last."""

    def __init__(self) -> None:
        self.heard_at = 0.0  # the loop's time of the last bytes
        self.status = 0  # 0: the head has not come
        self.headers: Headers = ()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._method = ""
        self._head: h11.Connection | None = None  # while the head comes
        self._body: BodyParser | None = None
        self._keeps_open = True
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._is_paused = False
        self._lost: str | None = None
        self._is_closed_there = False
        self._heard_before = 0.0  # the loop's time of the last bytes before the request
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_reusable(self) -> bool:
        """Return whether another request may be sent."""
        is_idle = self._head is None and (self._body is None or self._body.is_over)
        return is_idle and self._keeps_open and self._lost is None and not self._is_paused

    @property
    def is_dropped(self) -> bool:
        """Return whether the server closed the connection before any byte of the answer."""
        return self._is_closed_there and self.heard_at == self._heard_before

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reader, unless the end of the connection is that of the answer."""
        if self._body is not None and self._body.ends_with_connection and exc is None:
            self._body.is_over = True
        self._is_closed_there = self._lost is None and not isinstance(exc, TimeoutError)
        self.lose("it closed the connection" if exc is None else f"{exc}")

    def lose(self, why: str) -> None:
        """End the exchange; who waits for more of it gets LostError."""
        if self._lost is None:
            self._lost = why
            self._transport.abort()
            self._wake()

    def close(self) -> None:
        self.lose("it is closed")

    def data_received(self, data: bytes) -> None:
        """Take bytes of the answer."""
        self.heard_at = self._loop.time()
        try:
            if self._head is not None:
                data = self._take_head(self._head, data)
            if data:
                self._take_body(data)
        except (FramingError, h11.RemoteProtocolError) as error:
            self.lose(str(error))
            return
        if self._num_unread > _MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _take_body(self, data: bytes) -> None:
        if self._body is None:
            raise FramingError("it sent what was not requested")
        for piece in self._body.feed(data):
            self._pieces.append(piece)
            self._num_unread += len(piece)

    def _take_head(self, head: h11.Connection, data: bytes) -> bytes:
        """Take bytes of the head; return those behind it."""
        head.receive_data(data)
        while True:
            event = head.next_event()
            if isinstance(event, h11.InformationalResponse):
                continue
            if not isinstance(event, h11.Response):
                return b""
            self.status, self.headers = event.status_code, list(event.headers)
            closes = any(
                name == b"connection" and value.lower() == b"close" for name, value in self.headers
            )
            self._keeps_open = event.http_version == b"1.1" and not closes
            self._body = BodyParser(self._method, self.status, self.headers)
            self._head = None
            return head.trailing_data[0]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _changed(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        """Send a request, and return when the head of the answer has come. Raises LostError."""
        self.status, self.headers, self._body, self._method = 0, (), None, method
        self._heard_before = self.heard_at
        self._head = h11.Connection(h11.CLIENT, _MAX_HEAD_BYTES)
        sent = [
            self._head.send(h11.Request(method=method, target=target, headers=list(headers))),
            self._head.send(h11.Data(data=body)) if body else b"",
            self._head.send(h11.EndOfMessage()),
        ]
        self._transport.write(b"".join(each or b"" for each in sent))
        while not self.status:
            if self._lost is not None:
                raise LostError(self._lost)
            await self._changed()

    async def read(self) -> bytes:
        """Return what has come of the body since the last call; empty at its end.

        Raises LostError if the connection is gone before the end.
        """
        assert self._body is not None, "the head has come"
        while not self._pieces:
            if self._body.is_over:
                return b""
            if self._lost is not None:
                raise LostError(self._lost)
            await self._changed()
        found = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            if self._lost is None:
                self._transport.resume_reading()
        return found

    async def whole(self) -> bytes:
        """Return the rest of the body. Raises LostError."""
        found = []
        while piece := await self.read():
            found.append(piece)
        return b"".join(found)


class Pool:
    """The connections to one server."""

    def __init__(
        self, target: Target, tls: ssl.SSLContext | None, silence_s: float = _LEAST_SILENCE_S
    ) -> None:
        self.target = target
        self._silence_s = max(silence_s, _LEAST_SILENCE_S)
        self._tls = tls if target.tls_name is not None else None
        self._idle: list[Exchange] = []
        self._in_use: set[Exchange] = set()

    @property
    def heard_at(self) -> float:
        """Return the loop's time of the last bytes from the server on an open connection."""
        return max((each.heard_at for each in self._in_use), default=0.0)

    @property
    def num_open(self) -> int:
        return len(self._in_use)

    async def request(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes = b"",
    ) -> Exchange:
        """Send a request, and return its exchange with the head of the answer.

        The caller gives it back with `release`. Raises LostError.
        """
        sent: list[tuple[bytes, bytes]] = [(b"host", self.target.name.encode()), *headers]
        if body or method not in {"GET", "HEAD"}:
            sent.append((b"content-length", str(len(body)).encode()))
        exchange = self._idle_one()
        if exchange is not None:
            try:
                return await self._send(exchange, method, target, sent, body)
            except LostError:
                if not exchange.is_dropped:
                    raise
            # The server may have closed it while it was idle, or the request may have ended it.
        try:
            fresh = await self._connection()
        except LostError as error:
            raise LostError(str(error), is_unsent=exchange is None) from error
        return await self._send(fresh, method, target, sent, body)

    async def _send(
        self, exchange: Exchange, method: str, target: str, headers: Headers, body: bytes
    ) -> Exchange:
        self._in_use.add(exchange)
        try:
            await exchange.send(method, target, headers, body)
        except BaseException:
            self.release(exchange)
            raise
        return exchange

    def release(self, exchange: Exchange) -> None:
        """Keep the connection of an exchange that is over; close any other one."""
        self._in_use.discard(exchange)
        if exchange.is_reusable and len(self._idle) < _MOST_IDLE:
            self._idle.append(exchange)
        else:
            exchange.close()

    def lose(self, why: str) -> None:
        """End all exchanges and connections."""
        for each in [*self._in_use, *self._idle]:
            each.lose(why)
        self._idle.clear()

    def _idle_one(self) -> Exchange | None:
        """Return a connection that had a request before."""
        while self._idle:
            idle = self._idle.pop()
            if idle.is_reusable:
                return idle
            idle.close()
        return None

    async def _connection(self) -> Exchange:
        """Return a new connection. Raises LostError."""
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl": self._tls, "server_hostname": self.target.tls_name}
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                transport, exchange = await loop.create_connection(
                    Exchange, self.target.host, self.target.port, **options
                )
        except TimeoutError as error:
            told = f"it did not accept a connection within {_CONNECT_S:g} s"
            raise LostError(told, is_unsent=True) from error
        except OSError as error:
            raise LostError(f"cannot connect: {error.strerror or error}", is_unsent=True) from error
        _end_after(self._silence_s, transport.get_extra_info("socket"))
        return exchange


def _end_after(silence_s: float, connected: socket.socket) -> None:
    """Let the system end a connection whose other machine acknowledges nothing for so long."""
    # The sockets of uvloop's transports have no options.
    with socket.fromfd(connected.fileno(), connected.family, connected.type) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            whole_s = min(int(silence_s), 32_767)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, whole_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, whole_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
