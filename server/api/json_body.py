"""Routes whose JSON bodies have each key once.

Python would silently keep the last of equal keys, which is seldom the one that a client means.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from server.errors import BodyError

_MAX_NAME = 64  # characters of a key in the message


class JsonBodyRoute(APIRoute):
    """A route that reads its body with our decoder instead of Python's default one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, over a request that decodes JSON strictly."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the decoded body. Raises JSONDecodeError or BodyError."""
        body = await self.body()
        # As in json.loads, which would build a decoder for every body.
        return _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs. Raises BodyError for a key that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                break
            seen.add(name)
        short = name[:_MAX_NAME]
        raise BodyError(f"`{short}` is given twice in the same object, remove one", param=short)
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
