"""FastAPI's OpenAPI document, with the statuses and bodies that the server really sends."""

from collections.abc import Collection, Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_ANSWERS = {
    "400": "A mistake in the request.",
    "401": "No API key, or none that is known.",
    "403": "The Host header is not allowed.",
    "404": "No such model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "429": "The queue is full, or a bound of the API key is reached; with Retry-After.",
    "431": "Too many headers.",
    "500": "A bug of the server.",
    "503": "The model loads, the process ends, or the engine failed; with Retry-After.",
}


class ErrorDetail(BaseModel):
    """An error. Some kinds add numbers to these fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's envelope."""

    error: ErrorDetail


def describe(app: FastAPI, open_paths: Collection[str] | None) -> None:
    """Set the application's document, which is built at its first request.

    `open_paths` need no API key; None: no path needs one.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = found["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            schemas["ErrorDetail"] = ErrorDetail.model_json_schema()
            schemas["ErrorBody"] = {
                "type": "object",
                "properties": {"error": {"$ref": "#/components/schemas/ErrorDetail"}},
                "required": ["error"],
            }
            for path, methods in found["paths"].items():
                needs_key = open_paths is not None and path not in open_paths
                for operation in methods.values():
                    _tell_errors(operation, path, needs_key)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _tell_errors(operation: dict[str, Any], path: str, needs_key: bool) -> None:  # noqa: FBT001
    """Add the errors that a route can answer to its responses."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own, which this server never sends
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    statuses = sorted(_statuses(operation, path, needs_key))
    responses |= {each: {"description": _ANSWERS[each], "content": content} for each in statuses}


def _statuses(operation: dict[str, Any], path: str, needs_key: bool) -> Iterator[str]:  # noqa: FBT001
    """Yield the statuses of the errors that a route can answer."""
    yield from ("400", "403", "431", "500", "503")
    if needs_key:
        yield "401"
    has_body = "requestBody" in operation
    if has_body or operation.get("parameters"):
        yield "404"
    if has_body:
        yield from ("408", "413")
    if path.endswith("/completions"):  # only an answer waits in the queue
        yield "429"
