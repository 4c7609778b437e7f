"""Work for a client that may leave before it is done."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from server.access.refusals import ClientDisconnectedError

Result = TypeVar("Result")


async def until_disconnect(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """Return the work's result.

    If the client disconnects, cancel the work and raise ClientDisconnectedError.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
