"""Server-sent events whose request is aborted when the client goes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

_log = structlog.get_logger(__name__)

DONE = "data: [DONE]\n\n"
# Comments, which clients skip. The first makes proxies pass the headers on at once; the others
# keep them from closing a connection that is silent during a long prefill (nginx: 60 s).
OPENING, KEEP_ALIVE = ": open\n\n", ": keep-alive\n\n"


def event(body: BaseModel | dict[str, Any]) -> str:
    """One event."""
    if isinstance(body, BaseModel):
        return f"data: {body.model_dump_json()}\n\n"
    return f"data: {json.dumps(body)}\n\n"


class EventStream(StreamingResponse):
    """Streams events and calls `close` however the stream ends."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], close: Callable[[], None], send_timeout_s: float
    ) -> None:
        # Proxies must neither keep, nor collect, nor compress what should arrive at once.
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._close = close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except* TimeoutError:
            # The client takes nothing. Returning in the middle makes uvicorn close the connection.
            _log.warning("client_does_not_read", timeout_s=self._send_timeout_s)
        finally:
            self._close()
