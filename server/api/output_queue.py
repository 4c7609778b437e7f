"""The way of outputs from the engine's thread to the event loop, with one wakeup per step.

A wakeup makes the engine's thread release the interpreter lock, which it gets back only when the
loop is idle. A wakeup for each output would stop the thread once for each request of a batch.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from model_runtime.engine.admission import Places
from model_runtime.engine.engine import Engine
from model_runtime.request import FinishReason, Output, Request

Callback = Callable[[], None]


class OutputQueue:
    """The callbacks for each event loop. Both methods must be called on the engine's thread."""

    def __init__(self) -> None:
        self._callbacks: dict[asyncio.AbstractEventLoop, list[Callback]] = {}

    def put(self, loop: asyncio.AbstractEventLoop, callback: Callback) -> None:
        """Queue a callback that the loop runs in order after the next `flush`."""
        self._callbacks.setdefault(loop, []).append(callback)

    def flush(self) -> None:
        """Wake each event loop that has queued callbacks, once."""
        queued, self._callbacks = self._callbacks, {}
        for loop, callbacks in queued.items():
            # The loop may be closed when the process is ending.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_run, callbacks)


def _run(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        callback()


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
    ) -> None:
        """Submit the requests. Raises what the engine raises."""
        self.requests = requests
        self._engine = engine
        self._queue = queue
        self._max_unread = max_unread
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        callbacks = [partial(self._put, index) for index in range(len(requests))]
        engine.submit_all(list(zip(requests, callbacks, strict=True)), arrived, places)
        self._open = set(range(len(requests)))

    @property
    def is_over(self) -> bool:
        """Return whether the last output of every request has been read."""
        return not self._open and self._outputs.empty()

    async def next_output(self, limit_s: float | None) -> tuple[int, Output] | None:
        """Return (index of the request, output); each request's last has a finish_reason.

        Return None if `limit_s` seconds pass without any.
        """
        try:
            async with asyncio.timeout(limit_s):
                index, output = await self._outputs.get()
        except TimeoutError:
            return None
        if output.finish_reason is not None:
            self._open.discard(index)
        return index, output

    def close(self) -> None:
        """Abort unfinished requests; their pages are free after the current step."""
        for index in self._open:
            self._engine.abort(self.requests[index].request_id)
        self._open.clear()

    def _put(self, index: int, output: Output) -> None:
        # Runs on the engine's thread.
        self._queue.put(self._loop, partial(self._receive, index, output))

    def _receive(self, index: int, output: Output) -> None:
        if index not in self._open:
            return  # already closed or aborted here
        if self._outputs.qsize() >= self._max_unread:
            # A client that does not read must not fill the memory.
            error = f"more than {self._max_unread} outputs were not read (max_unread_tokens)"
            output = Output(finish_reason=FinishReason.ERROR, error=error)
            self._engine.abort(self.requests[index].request_id)
            self._open.discard(index)
        self._outputs.put_nowait((index, output))
