"""FastAPI's OpenAPI document, with the statuses and bodies that the server really sends."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_ANSWERS = {
    "400": "A mistake in the request.",
    "401": "No API key, or none that is known.",
    "404": "No such model or route.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "429": "The queue is full; with Retry-After.",
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


def describe(app: FastAPI) -> None:
    """Set the application's document, which is built at its first request."""

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
            for methods in found["paths"].values():
                for operation in methods.values():
                    _tell_errors(operation["responses"])
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _tell_errors(responses: dict[str, Any]) -> None:
    responses.pop("422", None)  # FastAPI's own, which this server never sends
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for status, text in _ANSWERS.items():
        responses[status] = {"description": text, "content": content}
