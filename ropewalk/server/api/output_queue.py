"""The way of outputs from the engine's thread to the event loop, with one wakeup per step.

A wakeup makes the engine's thread release the interpreter lock, which it gets back only when the
loop is idle. A wakeup for each output would stop the thread once for each request of a batch.
"""

import asyncio
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from ropewalk.model_runtime.engine.admission import Places
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.request import FinishReason, Output, Request
from ropewalk.server.access.refusals import ClientDisconnectedError
from ropewalk.server.middleware.connections import chunk_writer

Call = tuple[Callable[..., None], tuple[Any, ...]]


class OutputQueue:
    """The calls for each event loop. Both methods must be called on the engine's thread."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[Call]] = {}

    def put(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any
    ) -> None:
        """Queue a call that the loop makes in order after the next `flush`."""
        calls = self._calls.get(loop)
        if calls is None:
            calls = self._calls[loop] = []
        calls.append((callback, arguments))

    def flush(self) -> None:
        """Wake each event loop that has queued calls, once."""
        queued, self._calls = self._calls, {}
        for loop, calls in queued.items():
            # The loop may be closed when the process is ending.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_run, calls)


def _run(calls: list[Call]) -> None:
    for callback, arguments in calls:
        callback(*arguments)


class Submission:
    """The engine's requests for one HTTP request, on the event loop. Close it at the end."""

    def __init__(
        self,
        engine: Engine,
        queue: OutputQueue,
        requests: Sequence[Request],
        arrived: float,
        places: Places,
        *,
        max_unread: int,
        stream_interval: int,
    ) -> None:
        """Submit the requests. Raises what the engine raises.

        `max_unread`: most outputs that are ready and not read. `stream_interval`: the outputs that
        are ready together, but for the first token and the last output of a request.
        """
        self.requests = requests
        self._engine = engine
        self._max_unread = max_unread
        self._interval = stream_interval
        self._loop = loop = asyncio.get_running_loop()
        self._outputs: deque[tuple[int, list[Output]]] = deque()
        self._num_unread = 0
        self._held: list[list[Output]] = [[] for _ in requests]  # that wait for others
        self._num_wanted = [1 for _ in requests]  # outputs that are ready together
        self._waiter: asyncio.Future[bool] | None = None  # of the reader: whether an output came
        self._waits_since = 0.0  # the loop's time
        self._silence: asyncio.TimerHandle | None = None
        self.is_unread = False  # whether an answer ended because too much of it was not read
        # Called on the engine's thread.
        callbacks = [
            partial(queue.put, loop, self._receive, index) for index in range(len(requests))
        ]
        engine.submit_all(list(zip(requests, callbacks, strict=True)), arrived, places)
        self._open = set(range(len(requests)))

    @property
    def is_over(self) -> bool:
        return not self._open and not self._outputs

    async def has_output(self, limit_s: float | None) -> bool:
        """Wait for an output; return False if `limit_s` seconds pass without any."""
        if self._outputs:
            return True
        self._waits_since = self._loop.time()
        if limit_s is not None and self._silence is None:
            self._silence = self._loop.call_later(limit_s, self._note_silence, limit_s)
        self._waiter = self._loop.create_future()
        return await self._waiter

    def ready(self, most: int) -> Iterator[tuple[int, Sequence[Output]]]:
        """Yield up to `most` times outputs that are one event, as (index of the request, outputs).

        Each request's last output has a finish_reason.
        """
        for _ in range(min(most, len(self._outputs))):
            index, outputs = self._outputs.popleft()
            self._num_unread -= len(outputs)
            if outputs[-1].finish_reason is not None:
                self._open.discard(index)
            yield index, outputs

    def close(self) -> None:
        """Abort unfinished requests; their pages are free after the current step."""
        if self._silence is not None:
            self._silence.cancel()
        for index in self._open:
            self._engine.abort(self.requests[index].request_id)
        self._open.clear()

    def _receive(self, index: int, output: Output) -> None:
        if index not in self._open:
            return  # already closed or aborted here
        if self._num_unread >= self._max_unread:
            # A client that does not read must not fill the memory.
            error = f"more than {self._max_unread} outputs were not read"
            output = Output(finish_reason=FinishReason.ERROR, error=error)
            self.is_unread = True
            self._engine.abort(self.requests[index].request_id)
            self._open.discard(index)
        held = self._held[index]
        held.append(output)
        if output.finish_reason is None:
            # By counts and never by a clock: a router that continues a stream on another server
            # compares the events of both.
            if len(held) < self._num_wanted[index]:
                return
            if output.token_ids:
                self._num_wanted[index] = self._interval
        self._held[index] = []
        self._outputs.append((index, held))
        self._num_unread += len(held)
        self._wake(has_output=True)

    def _wake(self, *, has_output: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(has_output)

    def _note_silence(self, limit_s: float) -> None:
        """Wake the reader if it waits for `limit_s` seconds; else look again when it could be so.

        One timer of each stream, because a timer of each token costs a tenth of the token.
        """
        due = self._waits_since + limit_s
        if due <= self._loop.time():
            self._wake(has_output=False)
            due = self._loop.time() + limit_s
        self._silence = self._loop.call_at(due, self._note_silence, limit_s)


Result = TypeVar("Result")


async def until_disconnect(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """Return the work's result.

    If the client disconnects, cancel the work and raise ClientDisconnectedError.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


DONE = b"data: [DONE]\n\n"
# Comments, which clients skip. The first makes proxies pass the headers on at once; the others
# keep them from closing a connection that is silent during a long prefill (nginx: 60 s).
OPENING, KEEP_ALIVE = b": open\n\n", b": keep-alive\n\n"
# No text of a client, a model or an operator contains it.
_MARK = uuid.uuid4().hex


def json_bytes(body: BaseModel | dict[str, Any]) -> bytes:
    """Format a body as JSON.

    A dictionary may have lone surrogates, which a client sent. They are escaped.
    """
    if isinstance(body, BaseModel):
        return body.model_dump_json().encode()
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")


def event(body: BaseModel | dict[str, Any], name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, json_bytes(body))


@dataclass(frozen=True, slots=True)
class TextEvent:
    """An event that is sent many times, each time with another text and otherwise the same."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, body_of: Callable[[str], BaseModel]) -> Self:
        """Format the event once; `body_of` builds the body of a text."""
        before, _, after = event(body_of(_MARK)).partition(to_json(_MARK))
        return cls(before, after)

    def with_text(self, text: str) -> bytes:
        """Return the bytes of `event(body_of(text))`, twenty times faster."""
        return b"%b%b%b" % (self.before, to_json(text), self.after)


class EventStream(StreamingResponse):
    """A response that streams events and always calls `close` at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        # Proxies must not cache, buffer or compress events, which should arrive at once.
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._close = close
        self._write: Callable[[bytes], Awaitable[None]] | None = None

    async def stream_response(self, send: Send) -> None:
        """Send head, events and end; the events by the shortest way that the server has."""
        if self._write is None:
            await super().stream_response(send)
            return
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for events in self.body_iterator:
            if events:
                assert isinstance(events, bytes)
                await self._write(events)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        self._write = chunk_writer(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
