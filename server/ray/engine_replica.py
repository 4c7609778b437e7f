"""One engine as a replica: model, cache and scheduler, without HTTP.

Ray Serve makes an instance in a process of its own and calls its methods. Nothing here knows Ray.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from prometheus_client.metrics_core import Metric

from ropewalk.model_runtime.engine.admission import problem_of
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.errors import EngineStoppedError, QueueFullError
from ropewalk.model_runtime.request import FinishReason, Output, Request
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.process.preflight import bound_memory
from ropewalk.server.ray.autoscale import TokenLoad
from ropewalk.server.replicas.channel import Entry, Outbox, Outboxes
from ropewalk.server.replicas.watchdog import Watchdog
from ropewalk.server.replicas.wire import ACCEPTED, FULL, STOPPED, OutputEncoder, SentRequest
from ropewalk.server.sentences import DIED
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.load_service import ServedModel, load_served, metrics_of

SIGN_OF_LIFE_S = 1.0  # the longest silence of a channel; the settings allow no limit below 2 s

_log = structlog.get_logger(__name__)


class SentAnswer:
    """The answer of one request on its way to the API."""

    def __init__(
        self,
        run: int,
        request: Request,
        outbox: Outbox,
        on_end: Callable[[], None],
    ) -> None:
        """Take the number of the run, and a callback for its end."""
        self._run, self._outbox, self._on_end = run, outbox, on_end
        self._encoder = OutputEncoder()
        self.num_waiting = len(request.prompt_ids)  # tokens; 0 after the first token
        self.num_running = 0  # tokens, prompt and answer, after it

    def put(self, output: Output, engine: Engine) -> None:
        """Send an output; the engine's thread calls it."""
        is_last = output.finish_reason is not None
        fields: tuple[Any, ...] | str = self._encoder.encode(output)
        is_error = output.finish_reason is FinishReason.ERROR
        if output.finish_reason is FinishReason.ABORT or (is_error and not engine.is_running):
            # No answer: the request can go on elsewhere. A client that aborted hears nothing more.
            fields = STOPPED
        self._outbox.put((self._run, fields), self._on_end if is_last else None)
        self._count(len(output.token_ids))

    def _count(self, num_new: int) -> None:
        if num_new:
            self.num_running += num_new + self.num_waiting
            self.num_waiting = 0


class EngineReplica:
    """Serves the requests of one or more API processes with one engine."""

    async def __init__(self, settings: ServeSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the model and start its engine. Raises ModelError or SettingsError."""
        log_to_stderr(settings.log_format, settings.log_level)
        bound_memory()
        self._settings = settings
        self._answers: set[SentAnswer] = set()
        # Off the event loop, because Ray asks for signs of life meanwhile.
        await asyncio.to_thread(self._load)
        most = settings.max_unread_tokens * self._served.plan.config.max_num_seqs
        self._outboxes = Outboxes(most)
        self._engine.start(self._died, self._outboxes.flush)
        # Twice the silence after which its requests go on elsewhere.
        self._watchdog = Watchdog(2 * settings.replica_silence_seconds)

    def _load(self) -> None:
        loaded = load_served(self._settings)
        self._served: ServedModel = loaded.served
        self._metrics: Metrics = metrics_of(MetricFactory(), loaded.served.plan)
        self._engine: Engine = loaded.engine(self._metrics)
        self._grammars = GrammarCompiler(loaded.checkpoint.tokenizer)

    async def describe(self) -> ServedModel:
        return self._served

    async def generate(
        self,
        sent: SentRequest,
        request_id: str,  # noqa: ARG002  # for the router, which sees the arguments
        run: int,
        api: str,
    ) -> AsyncIterator[str]:
        """Serve a request; its outputs go to the channel of the API process `api`.

        Yields ACCEPTED, or the reason why this replica cannot serve the request, and ends when the
        request has ended. `run` is the request's number in the channel. Raises RequestError.
        """
        has_ended = asyncio.Event()
        with self._outboxes.of(api) as outbox:
            try:
                request = await self._request_of(sent)
                answer = SentAnswer(run, request, outbox, has_ended.set)
                self._engine.submit_all(
                    [(request, partial(answer.put, engine=self._engine))],
                    time.monotonic() - sent.waited_s,
                )
            except EngineStoppedError:
                yield STOPPED
                return
            except QueueFullError:
                yield FULL
                return
            self._answers.add(answer)
            try:
                yield ACCEPTED
                await has_ended.wait()
            finally:
                self._answers.remove(answer)
                if not has_ended.is_set():
                    self._engine.abort(request.request_id)

    async def outputs(
        self,
        api: str,
        replica: str,  # noqa: ARG002  # for the router
    ) -> AsyncIterator[list[Entry]]:
        """Yield the outputs of all requests of an API process, one message for each step.

        An empty message is a sign of life.
        """
        with self._outboxes.of(api) as outbox:
            async with aclosing(outbox.messages(SIGN_OF_LIFE_S)) as messages:
                async for entries in messages:
                    yield entries
            if outbox.is_full:
                _log.error("outputs_not_read", api=api)

    async def collect(self, replica: str) -> Sequence[Metric]:  # noqa: ARG002
        """Return the engine's metrics; `replica` is for the router."""
        return tuple(self._metrics.collect())

    async def record_replica_metadata(self) -> dict[str, int]:
        """Return the cache's length in pages, for the router. Ray calls it when this is ready."""
        config = self._served.plan.config
        return {"num_pages": config.capacity // config.page_size}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load, for the autoscaler (`autoscale.py`). Ray calls it regularly."""
        load = TokenLoad(
            sum(each.num_waiting for each in self._answers),
            [each.num_running for each in self._answers],
        )
        return {"load": load.share_of(self._served.plan.config)}

    async def check_health(self) -> None:
        """Raise EngineStoppedError if the engine has ended, or has made no step for too long."""
        problem = problem_of(self._engine, self._settings.stall_seconds)
        if problem is not None:
            raise EngineStoppedError(problem)

    async def __del__(self) -> None:
        """End the engine. Ray calls it after the last request has ended."""
        watchdog: Watchdog | None = getattr(self, "_watchdog", None)
        if watchdog is not None:  # it began to serve
            watchdog.end()
            await asyncio.to_thread(self._engine.stop)

    async def _request_of(self, sent: SentRequest) -> Request:
        if sent.grammar is None:
            return sent.request
        grammar = await asyncio.to_thread(self._grammars.compile_again, sent.grammar)
        return replace(sent.request, grammar=grammar)

    @staticmethod
    def _died() -> None:
        """End the process, as that of a plain server ends; another replica takes its place."""
        with suppress(Exception):
            _log.error("replica_ends")
        os._exit(DIED)
