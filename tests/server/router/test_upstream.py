"""Connections to a server: the retry on a new one is silent once, and then it counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ropewalk.server.router.upstream import LostError, Pool, Target

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Fragile:
    """A server that answers GET, and closes the connection of each other request."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.closes_port = False
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Pool]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._server = server
        port = server.sockets[0].getsockname()[1]
        pool = Pool(Target("127.0.0.1", port, f"127.0.0.1:{port}"), None)
        try:
            yield pool
        finally:
            pool.lose("the test is over")
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(_OK)
            self.num_ended += 1
            if self.closes_port:
                self._server.close()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("closes_port", [False, True])
def test_a_request_that_ends_its_server_counts(*, closes_port: bool) -> None:
    """On a reused connection it is sent once more, and is not one that no server has seen."""
    fragile = Fragile()
    fragile.closes_port = closes_port

    async def test() -> None:
        async with fragile.serving() as pool:
            for _ in range(2):
                exchange = await pool.request("GET", "/ready")
                assert await exchange.whole() == b"ok"
                pool.release(exchange)
            with pytest.raises(LostError) as found:
                await pool.request("POST", "/v1/completions")
            assert not found.value.is_unsent
            assert fragile.num_ended == (1 if closes_port else 2)
            if closes_port:
                with pytest.raises(LostError) as found:
                    await pool.request("GET", "/ready")
                assert found.value.is_unsent

    asyncio.run(test())
