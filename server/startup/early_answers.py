"""Answers on the port until the model is loaded: 503 with the phase of the load, and /live.

The port must answer before torch and FastAPI are imported, which takes seconds, so Python's own
modules do it, on a thread. Then uvicorn takes the same listening socket. The system queues
connections in between, so none is refused.
"""

import asyncio
import json
import socket
import ssl
import threading
import time
from contextlib import suppress

from ropewalk.server.envelope import envelope
from ropewalk.server.page.page_files import HEADERS, PageFile, has_playground, page_files
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.progress import LoadingProgress

_RETRY_S = 5
_LINGER_S = 2.0  # for a client to read the answer; closing earlier resets one that still sends
_LAST_S = 30.0  # for connections that were accepted before the model was loaded
_BACKLOG = 2048  # uvicorn's
_AT_ONCE = 64  # connections that are accepted before one is answered
_SHORT_OF_FILES_S = 0.05


class EarlyAnswers:
    """A small HTTP server that ends when the model is loaded."""

    def __init__(
        self,
        listener: socket.socket,
        progress: LoadingProgress,
        settings: ServeSettings,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Listen on a bound socket. The caller keeps it and closes it."""
        listener.listen(_BACKLOG)
        listener.setblocking(False)  # noqa: FBT003  # its only argument
        self._listener = listener
        self._progress = progress
        self._tls = tls
        self._limits = settings
        self._page = page_files() if has_playground(settings) else {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepts, self._has_stopped = threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over: asyncio.Event | None = None

    def start(self) -> None:
        """Answer on a thread from now on."""
        threading.Thread(target=self._run, name="early-answers", daemon=True).start()
        self._accepts.wait()

    def hand_over(self) -> None:
        """Accept no further connection. Those accepted before still get their answer."""
        if self._loop is not None and self._is_over is not None:
            with suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._is_over.set)
            self._has_stopped.wait()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._accepts.set()
            self._has_stopped.set()

    async def _serve(self) -> None:
        self._is_over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)
        self._accepts.set()
        await self._is_over.wait()
        # asyncio's own server may drop a connection that it has just accepted when it is closed.
        self._loop.remove_reader(self._listener)
        self._has_stopped.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        """Accept the connections that wait, and answer each in a task."""
        assert self._loop is not None
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is left, or the client has gone
                time.sleep(_SHORT_OF_FILES_S)
                return
            connection.setblocking(False)  # noqa: FBT003  # its only argument
            task = self._loop.create_task(self._answer(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: socket.socket) -> None:
        assert self._loop is not None
        reader = asyncio.StreamReader(self._limits.max_header_bytes)
        protocol = asyncio.StreamReaderProtocol(reader)
        with connection, suppress(OSError, EOFError, TimeoutError):
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            try:
                writer.write(self._response(await self._head(reader)))
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
                async with asyncio.timeout(_LINGER_S):
                    while await reader.read(1 << 16):
                        pass
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        """Return a request's head; empty if it is too long or too many clients wait."""
        if len(self._tasks) > self._limits.max_connections:
            return b""
        async with asyncio.timeout(self._limits.head_timeout_seconds):
            try:
                return await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                return b""

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method in {b"GET", b"HEAD"} and path.decode("latin-1") in self._page:
            return _page_response(self._page[path.decode("latin-1")], is_head=method == b"HEAD")
        if path == b"/live":
            status, body, retry = "200 OK", {"status": "loading"}, ""
        else:
            status, retry = "503 Service Unavailable", f"retry-after: {_RETRY_S}\r\n"
            body = envelope(
                "The model is loading.",
                "server_error",
                code="loading",
                details=self._progress.as_json(),
            )
        text = json.dumps(body).encode()
        lines = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{retry}"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        return lines.encode() + (b"" if method == b"HEAD" else text)


def _page_response(file: PageFile, *, is_head: bool) -> bytes:
    """Return a file of the playground, which shows the progress of the load."""
    headers = {**HEADERS, "Content-Type": file.media_type, "ETag": file.etag}
    headers |= {"Content-Length": str(len(file.content)), "Connection": "close"}
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode() + (b"" if is_head else file.content)
