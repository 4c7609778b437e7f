"""The application until the model is loaded: 503 with the phase of the load, /live, and the page.

The port answers before torch and FastAPI are imported, which takes seconds, so it is plain ASGI.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ropewalk.server.envelope import envelope
from ropewalk.server.middleware.availability import send_whole
from ropewalk.server.playground.page_files import HEADERS, has_playground, page_files
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.progress import LoadingProgress

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_RETRY_S = 5
_LINGER_S = 2.0  # for the rest of a body; a close with unread bytes would take the answer back


class LoadingAnswers:
    """An ASGI application that tells the progress of a load."""

    def __init__(self, settings: ServeSettings, progress: LoadingProgress) -> None:
        self._progress = progress
        self._page = page_files() if has_playground(settings) else {}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer at once, and close when the request's body has been read away."""
        status, headers, content = self._answer(scope["method"], scope["path"])
        await send_whole(send, status, {**headers, "Connection": "close"}, content, is_end=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body"})

    def _answer(self, method: str, path: str) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and content; the page shows the progress."""
        if method in {"GET", "HEAD"} and path in self._page:
            file = self._page[path]
            headers = {**HEADERS, "Content-Type": file.media_type, "ETag": file.etag}
            return 200, headers, file.content
        headers = {"Content-Type": "application/json"}
        if path == "/live":
            return 200, headers, b'{"status": "loading"}'
        body = envelope(
            "The model is loading.",
            "server_error",
            code="loading",
            details=self._progress.as_json(),
        )
        return 503, {**headers, "Retry-After": str(_RETRY_S)}, json.dumps(body).encode()
