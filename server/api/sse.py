"""Server-sent events; the request is aborted if the client disconnects."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"
# Comments, which clients skip. The first makes proxies pass the headers on at once; the others
# keep them from closing a connection that is silent during a long prefill (nginx: 60 s).
OPENING, KEEP_ALIVE = ": open\n\n", ": keep-alive\n\n"


def event(body: BaseModel | dict[str, Any]) -> str:
    """Format one event."""
    if isinstance(body, BaseModel):
        return f"data: {body.model_dump_json()}\n\n"
    return f"data: {json.dumps(body)}\n\n"


class EventStream(StreamingResponse):
    """A response that streams events and always calls `close` at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        # Proxies must not cache, buffer or compress events, which should arrive at once.
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
