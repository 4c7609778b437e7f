"""Errors as OpenAI writes them, and the one table from a runtime error to an HTTP status."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from model_runtime.errors import (
    EngineStoppedError,
    QueueFullError,
    RequestError,
    RopewalkError,
    UnknownModelError,
)

_log = structlog.get_logger(__name__)

_MAX_ERRORS = 10  # told at once; a long bad list must not make a long answer
_MAX_MESSAGE = 500  # characters of one of them
_MAX_NAME = 64  # characters of a field's name, which a client may have chosen

# runtime error -> (status, type, code, seconds to wait before a retry); first match wins
_STATUS: tuple[tuple[type[RopewalkError], int, str, str | None, int | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found", None),
    (RequestError, 400, "invalid_request_error", None, None),
    (QueueFullError, 429, "rate_limit_error", "queue_full", 1),
    (EngineStoppedError, 503, "server_error", "engine_stopped", 5),
)


# Fields that may have one of several shapes.
_SHAPES = {
    "prompt": "Must be a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "Must be a string or a list of strings",
    "content": "Must be a string or a list of text parts",
}


def envelope(
    message: str,
    kind: str,
    *,
    param: str | None = None,
    code: str | None = None,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """OpenAI's error body. What a client named may hold half characters, which no JSON can."""
    return {
        "error": {
            "message": _encodable(message),
            "type": kind,
            "param": None if param is None else _encodable(param),
            "code": code,
            **(details or {}),
        }
    }


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def rejection_reasons() -> list[str]:
    """Every word that `rejection_reason` can answer."""
    of_requests = ["context_length_exceeded", "kv_cache_exceeded", "too_many_answers", "invalid"]
    return [*of_requests, *(code for _, _, _, code, _ in _STATUS if code is not None)]


def rejection_reason(error: RopewalkError) -> str:
    """A short, bounded word for the metrics."""
    if isinstance(error, RequestError) and error.code is not None:
        return error.code
    return next(
        (code for cls, _, _, code, _ in _STATUS if isinstance(error, cls) and code), "invalid"
    )


def install(app: FastAPI, on_rejected: Callable[[str], None]) -> None:
    """Answer every failure in the envelope: never 422, never a traceback.

    `on_rejected` hears of bodies to /v1 that fail the schema, with the metrics' word for it.
    """

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        if request.url.path.startswith("/v1/"):
            on_rejected("invalid")
        return _validation_answer(error)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400 and request.url.path.startswith("/v1/"):
            on_rejected("invalid")  # JSON that Python cannot read
        return _http_answer(error)

    app.add_exception_handler(RopewalkError, _on_ropewalk_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_ropewalk_error(request: Request, error: Exception) -> JSONResponse:
    for cls, status, kind, code, retry_after_s in _STATUS:
        if not isinstance(error, cls):
            continue
        body = envelope(str(error), kind, code=code)
        if isinstance(error, RequestError):
            body = envelope(
                str(error), kind, param=error.param, code=error.code or code, details=error.details
            )
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s else None
        return JSONResponse(body, status, headers)
    return await _on_bug(request, error)


def _validation_answer(error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = _merged(error.errors())[:_MAX_ERRORS]
    message = "; ".join(_problem(each) for each in problems)
    return JSONResponse(
        envelope(message, "invalid_request_error", param=_field(problems[0]) or None), 400
    )


def _merged(problems: Sequence[Any]) -> list[dict[str, Any]]:
    """One problem for a field that may have one of several shapes, instead of one per shape.

    A value of the right shape that breaks a limit is told the limit; another, the shapes.
    """
    merged: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in problems:
        loc = tuple(each["loc"])
        shaped = next((at for at, part in enumerate(loc) if part in _SHAPES), len(loc))
        merged.setdefault(loc[: shaped + 1], []).append(each)
    found: list[dict[str, Any]] = []
    for loc, of_field in merged.items():
        limits = [each for each in of_field if not each["type"].endswith("_type")]
        if loc[-1] not in _SHAPES or limits:
            found.append((limits or of_field)[0])
        else:
            found.append({"type": "shape", "loc": loc, "msg": _SHAPES[loc[-1]]})
    return found


def _http_answer(error: HTTPException) -> JSONResponse:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse(envelope(str(error.detail), kind), error.status_code, error.headers)


async def _on_bug(_: Request, error: Exception) -> JSONResponse:
    _log.error("unexpected_error", exc_info=error)
    return JSONResponse(envelope("The server failed unexpectedly.", "server_error"), 500)


def _field(problem: dict[str, Any]) -> str:
    """The body's field, without the branch of a union that was tried."""
    if problem["type"] == "json_invalid":
        return ""  # its location is a character
    parts = [part for part in problem["loc"][1:] if not _is_union_branch(part)]
    if "param" in problem.get("ctx", {}):
        parts.append(problem["ctx"]["param"])
    return ".".join(str(part)[:_MAX_NAME] for part in parts)


def _is_union_branch(part: Any) -> bool:
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part or "-" in part)


def _problem(problem: dict[str, Any]) -> str:
    """`field`: what is accepted. Given: the value, where it is a number."""
    if problem["type"] == "json_invalid":
        return f"The body is not valid JSON, at character {problem['loc'][-1]}."
    if problem["loc"] == ("body",) and problem["type"].startswith(("model_", "missing")):
        return "The body must be a JSON object, sent with Content-Type: application/json."
    name, text = _field(problem), problem["msg"][:_MAX_MESSAGE]
    if problem["type"] in ("model_type", "model_attributes_type"):
        text = "Must be a JSON object"  # pydantic names our class
    given = problem.get("input")
    if isinstance(given, bool | int | float):
        text = f"{text}. Given: {_short(given)}"
    return f"`{name}`: {text}"


def _short(value: float) -> str:
    # An integer may have thousands of digits, which Python refuses to print.
    if isinstance(value, int) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    return json.dumps(value)
