"""A server of others' making: it says that it serves the same, and gives what a test tells it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn


class OtherServer:
    """A small ASGI application; its answers are attributes that a test sets."""

    def __init__(self) -> None:
        self.is_ready = True
        self.models: dict[str, Any] = {"object": "list", "data": []}
        self.parts: Sequence[bytes] = ()  # of a stream, which is then broken off
        self.status = 200  # another one is answered instead of the stream
        self.status_afterwards: int | None = None  # as `status`, behind the first stream
        self.code = "of_the_other"
        self.is_hashing = False  # /v1/models does not answer
        self.is_held = False  # behind the parts of a stream, or before another answer
        self.num_asked = 0
        self.url = ""
        self.port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/ready":
            await self._json(send, 200 if self.is_ready else 503, {})
        elif path == "/v1/models":
            while self.is_hashing:  # noqa: ASYNC110  # another thread sets it
                await asyncio.sleep(0.01)
            await self._json(send, 200, self.models)
        elif scope["method"] == "POST":
            await self._answer(receive, send)
        else:
            await self._json(send, 404, {})

    async def _answer(self, receive: Any, send: Any) -> None:
        self.num_asked += 1
        while (await receive()).get("more_body"):
            pass
        if self.status != 200:
            await self._held()
            await self._json(send, self.status, {"error": {"code": self.code}})
            return
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0.05)  # for the bytes to be read
        await self._held()
        self.status = self.status_afterwards or self.status
        # uvicorn closes the connection of an answer that is not whole.

    async def _held(self) -> None:
        while self.is_held:  # noqa: ASYNC110  # another thread sets it
            await asyncio.sleep(0.01)

    async def _json(self, send: Any, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *([(b"retry-after", b"1")] if status in {429, 503} else []),
        ]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": content})


@contextmanager
def other_server(host: str = "127.0.0.1", port: int = 0) -> Iterator[OtherServer]:
    """Serve on an address of loopback, on a free port if none is named, until the block ends."""
    app = OtherServer()
    config = uvicorn.Config(app, lifespan="off", log_level="critical", loop="asyncio")
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        app.port = listener.getsockname()[1]
        app.url = f"http://{host}:{app.port}"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield app
        finally:
            server.should_exit = True
            thread.join()
