"""Errors of the routes of Anthropic's API, in its envelope."""

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.sse import json_bytes

_PATH = "/v1/messages"
# status -> Anthropic's type of an error
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIRST_OWN = 500  # from here on it is the server's fault


class AnthropicErrorsMiddleware:
    """Middleware that puts OpenAI's error bodies into Anthropic's envelope, on its routes only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == _PATH or path.startswith(f"{_PATH}/")):
            await self._app(scope, receive, send)
            return
        held: list[Message] = []  # the start of an error, until its body is known
        body = b""

        async def send_in_envelope(message: Message) -> None:
            nonlocal body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held.append(message)
                return
            if not held:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                start = held.pop()
                content = _in_envelope(start["status"], body)
                MutableHeaders(scope=start)["Content-Length"] = str(len(content))
                await send(start)
                await send({**message, "body": content})

        await self._app(scope, receive, send_in_envelope)


def _in_envelope(status: int, body: bytes) -> bytes:
    """Return an error's body with Anthropic's type; its other fields stay beside the message."""
    try:
        error: dict[str, Any] = dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body  # an empty body, or none of ours
    error["type"] = error_type(status)
    return json_bytes({"type": "error", "error": error})


def error_type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= _FIRST_OWN else "invalid_request_error")
