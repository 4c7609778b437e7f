"""Errors in OpenAI's format, and the only table from runtime errors to HTTP statuses."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ropewalk.model_runtime.errors import (
    EngineStoppedError,
    OutputNotReadError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    RopewalkError,
    UnknownModelError,
)
from ropewalk.server.access.refusals import KeyLimitError
from ropewalk.server.envelope import envelope
from ropewalk.server.wording import accepted, choices, did_you_mean

_log = structlog.get_logger(__name__)

REQUEST_TIMEOUT = "request_timeout"
OUTPUT_NOT_READ = "output_not_read"  # a router passes this failure of a stream on
MAX_ERRORS = 10  # in one answer; a long invalid list must not make a long answer
_MAX_MESSAGE = 500  # characters of one of them
_MAX_NAME = 64  # characters of a field's name, which a client may have chosen
_MAX_GIVEN = 64  # characters of a string that a message repeats

# runtime error -> (status, type, code, seconds to wait before a retry); first match wins
_STATUS: tuple[tuple[type[RopewalkError], int, str, str | None, int | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found", None),
    (RequestTimeoutError, 408, "invalid_request_error", REQUEST_TIMEOUT, None),
    (RequestError, 400, "invalid_request_error", None, None),
    (KeyLimitError, 429, "rate_limit_error", "key_limit_reached", 1),
    (QueueFullError, 429, "rate_limit_error", "queue_full", 1),
    (EngineStoppedError, 503, "server_error", "engine_stopped", 5),
    (OutputNotReadError, 503, "server_error", OUTPUT_NOT_READ, None),
)


# Fields that may have one of several shapes.
_SHAPES = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "must be a string or a list of strings",
    "content": "must be a string or a list of text parts",
    "output": "must be a string or a list of text parts",
    "system": "must be a string or a list of text blocks",
    "chat_template_kwargs": "must be an object of strings, numbers, booleans and nulls",
}
# Their `input` is the object around the field, or the message states what is given.
_WITHOUT_VALUE = {"missing", "other_kind", "shape", "unusable"}
# FastAPI's words if Python cannot read a body: it is no Unicode, or a number is too long.
_UNREADABLE = "There was an error parsing the body"


class BodyError(HTTPException):
    """A body that cannot be taken as JSON, though it is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(400, message)
        self.param = param


def rejection_reasons() -> list[str]:
    """Return every word that `rejection_reason` can return."""
    of_requests = ["context_length_exceeded", "kv_cache_exceeded", "too_many_answers", "invalid"]
    return [*of_requests, *(code for _, _, _, code, _ in _STATUS if code is not None)]


def rejection_reason(error: RopewalkError) -> str:
    """Return the rejection reason for the metrics, one word of a bounded set."""
    if isinstance(error, RequestError) and error.code is not None:
        return error.code
    return next(
        (code for cls, _, _, code, _ in _STATUS if isinstance(error, cls) and code), "invalid"
    )


def install(app: FastAPI, on_rejected: Callable[[str], None]) -> None:
    """Install handlers that answer every failure in the envelope: never 422, never a traceback.

    If a body to /v1 fails the schema, `on_rejected` is called with the metrics' reason.
    """

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        if request.url.path.startswith("/v1/"):
            on_rejected("invalid")
        return _validation_answer(error)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400 and request.url.path.startswith("/v1/"):
            on_rejected("invalid")  # JSON that Python cannot read
        return _http_answer(request, error)

    app.add_exception_handler(RopewalkError, _on_ropewalk_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_ropewalk_error(request: Request, error: Exception) -> JSONResponse:
    for cls, status, kind, code, retry_after_s in _STATUS:
        if not isinstance(error, cls):
            continue
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s else None
        if isinstance(error, KeyLimitError):
            headers = {"Retry-After": str(error.retry_after_s)}
        if isinstance(error, RequestTimeoutError):
            # The clients of OpenAI and Anthropic repeat a 408, and so would wait several times.
            headers = {"X-Should-Retry": "false"}
        return JSONResponse(_body_of(error, kind, code), status, headers)
    return await _on_bug(request, error)


def _body_of(error: RopewalkError, kind: str, code: str | None) -> dict[str, Any]:
    if isinstance(error, RequestError):
        code = error.code or code
        return envelope(str(error), kind, param=error.param, code=code, details=error.details)
    details = error.details if isinstance(error, KeyLimitError) else None
    return envelope(str(error), kind, code=code, details=details)


def error_body(error: RopewalkError) -> dict[str, Any]:
    """Return the body of an error of the table, for an event after the first byte."""
    kind, code = next((kind, code) for cls, _, kind, code, _ in _STATUS if isinstance(error, cls))
    return _body_of(error, kind, code)


def _validation_answer(error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = _merged(error.errors())
    told = dict.fromkeys(map(_problem, problems))  # shapes of one field may have equal limits
    message = "; ".join(list(told)[:MAX_ERRORS])
    return JSONResponse(
        envelope(message, "invalid_request_error", param=_field(problems[0]) or None), 400
    )


def _merged(problems: Sequence[Any]) -> list[dict[str, Any]]:
    """Return one problem for a field with several allowed shapes, instead of one per shape.

    If a value has the right shape but breaks a limit, the problem names the limit. Otherwise it
    names the shapes.
    """
    merged: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in problems:
        loc = tuple(each["loc"])
        if "param" in each.get("ctx", {}):
            loc = (*loc, each["ctx"]["param"])  # these have the location of the object around
        shaped = next((at for at, part in enumerate(loc) if part in _SHAPES), len(loc))
        merged.setdefault(loc[: shaped + 1], []).append(each)
    found: list[dict[str, Any]] = []
    for loc, of_field in merged.items():
        limits = [each for each in of_field if not each["type"].endswith("_type")]
        # A route whose prompt has one shape, /tokenize, has no branch in the location.
        has_one = loc == ("body", "prompt") and of_field[0]["loc"] == loc
        if loc[-1] not in _SHAPES or has_one:
            found += of_field
        elif limits:
            shape = limits[0]["loc"][: len(loc) + 1]
            found += [each for each in limits if each["loc"][: len(loc) + 1] == shape]
        else:
            found.append({"type": "shape", "loc": loc, "msg": _SHAPES[loc[-1]]})
    return found


def _http_answer(request: Request, error: HTTPException) -> JSONResponse:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message, param, path = str(error.detail), None, request.url.path[:_MAX_NAME]
    if isinstance(error, BodyError):
        param = error.param
    elif message == _UNREADABLE:
        message = "The body must be JSON in UTF-8, with numbers of at most 4300 digits."
    elif error.status_code == 404:
        message = f"The server has no route {path!a}.{_nearest_route(request)}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"The route {path} accepts {allowed}, not {request.method[:_MAX_NAME]}."
    return JSONResponse(envelope(message, kind, param=param), error.status_code, error.headers)


def _nearest_route(request: Request) -> str:
    """Return a sentence with the route that was meant, or with the list of all."""
    paths = request.app.openapi()["paths"]  # kept after the first call
    return did_you_mean(request.url.path.lower(), paths) or " /docs lists them."


async def _on_bug(_: Request, error: Exception) -> JSONResponse:
    _log.error("unexpected_error", exc_info=error)
    return JSONResponse(envelope("The server failed unexpectedly.", "server_error"), 500)


def _field(problem: dict[str, Any]) -> str:
    """Return the name of the body's field, without the branch of a union."""
    if problem["type"] == "json_invalid":
        return ""  # its location is a character position
    parts = [part for part in problem["loc"][1:] if not _is_union_branch(part)]
    if "param" in problem.get("ctx", {}):
        parts.append(problem["ctx"]["param"])
    return ".".join(str(part)[:_MAX_NAME] for part in parts)


def _is_union_branch(part: Any) -> bool:
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part or "-" in part)


def _problem(problem: dict[str, Any]) -> str:
    """Format a problem: the field, what it accepts, the value, and the word that was meant."""
    if problem["type"] == "json_invalid":
        return f"The body is not valid JSON, at character {problem['loc'][-1]}."
    if problem["loc"] == ("body",) and problem["type"].startswith(("model_", "missing")):
        return "The body must be a JSON object, sent with Content-Type: application/json."
    text = accepted(problem)
    if problem["type"] == "string_pattern_mismatch" and problem["loc"][-1] == "[key]":
        text = "must be named by a token id"  # the only keys with a pattern
    text = text[:_MAX_MESSAGE]
    if problem["type"] not in _WITHOUT_VALUE:
        hint = did_you_mean(problem["input"], choices(problem))
        text = f"{text}. Given: {_given(problem)}{'.' if hint else ''}{hint}"
    return f"`{_field(problem)}` {text}"


def _given(problem: dict[str, Any]) -> str:
    """Return the value in JSON, or its length if that is the problem; long ones are shortened."""
    value, context = problem["input"], problem.get("ctx", {})
    if problem["type"] == "string_too_long":
        return str(len(value))
    if problem["type"] in ("too_long", "too_many"):
        return str(context.get("actual_length") or context.get("given") or len(value))
    if isinstance(value, list | dict):
        return ("a list" if isinstance(value, list) else "an object") if value else str(value)
    if isinstance(value, str):
        more = "..." if len(value) > _MAX_GIVEN else ""
        return json.dumps(value[:_MAX_GIVEN]) + more
    # An integer may have thousands of digits, which Python refuses to print.
    if isinstance(value, int) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    return json.dumps(value)
