"""Events of a stream are written past h11, whose bytes they keep."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from ropewalk.server.api.output_queue import EventStream
from ropewalk.server.middleware.connections import ChunkProtocol, chunk_writer

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
_EVENTS = [b": open\n\n", *(b"data: %d\n\n" % number for number in range(20)), b"", b"x" * 70_000]


class Streams:
    """An application that answers each request with the same events."""

    def __init__(self, events: Sequence[bytes], *, is_direct: bool = True) -> None:
        self.is_closed = asyncio.Event()
        self.num_sent = 0
        self._events = events
        self._is_direct = is_direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        assert chunk_writer(scope) is not None
        if not self._is_direct:
            scope["state"].clear()
        await EventStream(self._given(), self.is_closed.set)(scope, receive, send)

    async def _given(self) -> AsyncIterator[bytes]:
        for each in self._events:
            yield each
            self.num_sent += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    """Serve an application, and yield what connects to it."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's type of an application is narrower
        lifespan="off",
        log_config=None,
        h11_max_incomplete_event_size=65536,
    )
    config.load()
    state, open_writers = ServerState(), []
    server = await asyncio.get_running_loop().create_server(
        lambda: ChunkProtocol(config, state, {}), "127.0.0.1", 0
    )

    async def connect() -> Connection:
        found = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=4096)
        open_writers.append(found[1])
        return found

    try:
        yield connect
    finally:
        for each in open_writers:
            each.close()
        server.close()


async def body_of(reader: asyncio.StreamReader, client: h11.Connection) -> bytes:
    """The body of the next answer, as h11's client reads it."""
    body = b""
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body


def asking(client: h11.Connection) -> bytes:
    """The bytes of a request."""
    return (client.send(h11.Request(method="GET", target="/", headers=[("Host", "a")])) or b"") + (
        client.send(h11.EndOfMessage()) or b""
    )


def run(work: Awaitable[Any]) -> Any:
    """Run it within half a minute."""

    async def limited() -> Any:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(limited())


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_the_bytes_are_those_of_h11(version: bytes) -> None:
    """Chunked to HTTP/1.1 and plain to HTTP/1.0; an empty event does not end the body."""

    async def received(*, is_direct: bool) -> bytes:
        async with served(Streams(_EVENTS, is_direct=is_direct)) as connect:
            reader, writer = await connect()
            head = b"GET / HTTP/%b\r\nHost: a\r\nConnection: close\r\n\r\n" % version
            writer.write(head)
            return await reader.read()

    found = run(received(is_direct=True))
    assert found == run(received(is_direct=False))
    assert (b"\r\ntransfer-encoding: chunked\r\n" in found.lower()) == (version == b"1.1")
    assert found.endswith(b"\r\n0\r\n\r\n" if version == b"1.1" else b"xxx")


def test_a_connection_serves_further_requests_after_a_stream() -> None:
    """One after the other, and two that come together."""
    expected = b"".join(_EVENTS)

    async def check() -> None:
        async with served(Streams(_EVENTS)) as connect:
            reader, writer = await connect()
            client = h11.Connection(h11.CLIENT)
            for _ in range(3):
                writer.write(asking(client))
                assert await body_of(reader, client) == expected
                client.start_next_cycle()
            writer.write(_GET + asking(client))
            assert await body_of(reader, client) == expected
            client.start_next_cycle()
            asking(client)
            assert await body_of(reader, client) == expected

    run(check())


def test_a_slow_client_gets_everything_and_holds_the_stream_back() -> None:
    """No event is made for a client that does not read."""
    events = [b"data: %d%b\n\n" % (number, b"x" * 8000) for number in range(2000)]

    async def check() -> None:
        app = Streams(events)
        async with served(app) as connect:
            reader, writer = await connect()
            client = h11.Connection(h11.CLIENT)
            writer.write(asking(client))
            await asyncio.sleep(0.25)
            assert app.num_sent < len(events)
            while not app.is_closed.is_set():
                await asyncio.sleep(0.01)
                client.receive_data(await reader.read(65536))
            assert await body_of(reader, client) == b"".join(events)

    run(check())
