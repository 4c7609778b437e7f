"""Routes whose JSON bodies have each key once."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from ropewalk.server.errors import BodyError
from ropewalk.server.middleware.json_pieces import decode_in_pieces
from ropewalk.server.middleware.large_bodies import LARGE, LargeBody
from ropewalk.server.strict_json import TwiceError, object_of

_MAX_NAME = 64  # characters of a key in the message


class JsonBodyRoute(APIRoute):
    """A route that reads its body with our decoder instead of Python's default one.

    A large body is decoded and validated in a thread.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, over a request that decodes JSON strictly."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            large = request.scope.get("state", {}).get("large_body")
            if large is None or self.body_field is None:
                return await handler(_JsonRequest(request.scope, request.receive))
            try:
                return await handler(_LargeRequest(request, large, self._validated))
            except _InvalidError as error:
                raise RequestValidationError(error.problems) from None

        return handle

    def _validated(self, body: bytes) -> Any:
        """Return the route's model of a body. Raises JSONDecodeError, BodyError, _InvalidError."""
        assert self.body_field is not None
        value, problems = self.body_field.validate(_decoded(body), {}, loc=("body",))
        if problems:
            raise _InvalidError(problems)
        return value


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the decoded body. Raises JSONDecodeError or BodyError."""
        return _decoded(await self.body())


class _LargeRequest(Request):
    """A request whose `json` is the model itself, which FastAPI's own validation lets pass."""

    def __init__(
        self, request: Request, large: LargeBody, validated: Callable[[bytes], Any]
    ) -> None:
        super().__init__(request.scope, request.receive)
        self._large = large
        self._validated = validated

    async def body(self) -> bytes:
        """Return any bytes: FastAPI asks whether there are some, and keeps them to the end."""
        return b"a large body"

    async def json(self) -> Any:
        """Return the model. Raises JSONDecodeError, BodyError or _InvalidError."""
        return await self._large.parsed(self._validated)


class _InvalidError(HTTPException):
    """Problems of a body. FastAPI lets no other class of error pass out of `json`."""

    def __init__(self, problems: list[Any]) -> None:
        super().__init__(400)
        self.problems = problems


def _decoded(body: bytes) -> Any:
    try:
        if len(body) > LARGE:
            return decode_in_pieces(body)
        return _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except TwiceError as error:
        short = error.name[:_MAX_NAME]
        told = f"`{short}` is given twice in the same object, remove one"
        raise BodyError(told, param=short) from None


# As in json.loads, which would build a decoder for every body.
_DECODER = json.JSONDecoder(object_pairs_hook=object_of)
