"""Shared parts of the routes: the engine, the served names, and the path of a request."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from model_runtime.deployment import Deployment, RopeRequest
from model_runtime.engine.engine import Engine, Reservation
from model_runtime.errors import RequestError, RopewalkError, UnknownModelError
from model_runtime.request import FinishReason, Output, Request
from model_runtime.text.chat_template import ChatTemplate
from model_runtime.text.grammar import Grammar, GrammarCompiler
from model_runtime.text.tokenizer import Tokenizer
from server.api.generation_schema import GenerationRequest
from server.api.limits import ServiceLimits
from server.api.output_mailbox import Mailbox
from server.errors import rejection_reason
from server.metrics import Metrics
from server.middleware.http_metrics import HttpMetrics

Result = TypeVar("Result")


class Submission:
    """The engine's requests for one HTTP request, on the event loop. Close it at the end."""

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        requests: Sequence[Request],
        arrived: float,
        reservation: Reservation,
        *,
        max_unread: int,
    ) -> None:
        self.requests = requests
        self._engine = engine
        self._mailbox = mailbox
        self._max_unread = max_unread
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        listeners = [partial(self._hand_over, index) for index in range(len(requests))]
        engine.submit_all(list(zip(requests, listeners, strict=True)), arrived, reservation)
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

    def _hand_over(self, index: int, output: Output) -> None:
        # Runs on the engine's thread.
        self._mailbox.put(self._loop, partial(self._receive, index, output))

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


@dataclass(frozen=True, slots=True)
class Service:
    """One engine behind one or more served names."""

    engine: Engine
    tokenizer: Tokenizer
    deployments: Mapping[str, Deployment]  # the first serves requests that name no model
    metrics: Metrics
    http_metrics: HttpMetrics
    vocab_size: int
    sampling_defaults: Mapping[str, float]  # the model's own, for fields that a request leaves out
    max_len: int  # positions of the longest sequence of any deployment
    chat_template: ChatTemplate
    allowed_chat_template_kwargs: frozenset[str]
    limits: ServiceLimits
    grammars: GrammarCompiler
    mailbox: Mailbox = field(default_factory=Mailbox)  # sent after each of the engine's steps
    created: int = field(default_factory=lambda: int(time.time()))

    def deployment(self, name: str | None) -> Deployment:
        """Return the deployment of that name. Raises UnknownModelError."""
        if name is None:
            return next(iter(self.deployments.values()))
        if name not in self.deployments:
            served = ", ".join(self.deployments)
            raise UnknownModelError(
                f"The model {name[:64]!a} does not exist. Served: {served}.", param="model"
            )
        return self.deployments[name]

    def max_model_len(self, deployment: Deployment) -> int:
        """Return the positions of the deployment's longest sequence that the cache can hold."""
        return min(deployment.max_len, self.max_len)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        """Tokenise a text off the event loop, because a long one takes a while.

        A text that is too long for any tokens is refused first. Raises RequestError, which names
        the request's field `param`.
        """
        self.check_length(len(text), param)
        return tuple(
            await asyncio.to_thread(
                self.tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param
            )
        )

    async def grammar(self, schema: Mapping[str, Any] | None) -> Grammar | None:
        """Compile the grammar of a schema off the event loop.

        Raises RequestError or QueueFullError.
        """
        if schema is None:
            return None
        text = await asyncio.to_thread(self.grammars.text_of, schema)
        return await asyncio.wrap_future(self.grammars.compile(text))

    async def submit(
        self,
        body: GenerationRequest,
        read_prompts: Callable[[], Awaitable[Sequence[tuple[int, ...]]]],
        extra_stop: Sequence[str] = (),
    ) -> Submission:
        """Tokenise, place and queue a request. Raises what the engine and placement raise."""
        arrived = time.monotonic()
        try:
            deployment = self.deployment(body.model)
            self.limits.check(body)
            self.engine.config.limits.check(body.sampling(1, {}, extra_stop)[0])
            for token_id, _ in body.logit_bias_pairs():
                self.check_token_id(token_id, "logit_bias")
            for token_id in body.stop_token_ids or ():
                self.check_token_id(token_id, "stop_token_ids")
            num_answers = body.num_prompts * body.num_answers
            with self.engine.reserved(num_answers) as reservation:
                grammar = await self.grammar(body.schema_asked)
                requests = []
                for prompt in await read_prompts():
                    requests += self._requests(body, deployment, prompt, extra_stop, grammar)
                return Submission(
                    self.engine,
                    self.mailbox,
                    requests,
                    arrived,
                    reservation,
                    max_unread=self.limits.max_unread_tokens,
                )
        except RopewalkError as error:
            self.metrics.rejected(rejection_reason(error))
            if isinstance(error, RequestError) and error.param == "prompt":
                # Placement and engine do not know the field that a prompt comes from.
                error.param = body.prompt_field
                error.args = (str(error).replace("`prompt`", f"`{body.prompt_field}`"),)
            raise

    def check_length(self, num_characters: int, param: str) -> None:
        """Refuse a text that must be too long before it is tokenised. Raises RequestError."""
        most = self.max_len * self.tokenizer.longest_token
        why = f"{self.max_len} tokens of at most {self.tokenizer.longest_token}"
        if self.limits.max_prompt_chars is not None and self.limits.max_prompt_chars < most:
            most, why = self.limits.max_prompt_chars, "max_prompt_chars"
        if num_characters > most:
            raise RequestError(
                f"`{param}` must be at most {most} characters ({why}). Given: {num_characters}",
                param=param,
                code="context_length_exceeded",
            )

    def check_token_id(self, token_id: int, param: str) -> None:
        """Refuse an id outside the vocabulary. Raises RequestError."""
        if token_id >= self.vocab_size:
            raise RequestError(
                f"`{param}` token ids must be < {self.vocab_size}. Given: {token_id}", param=param
            )

    def _requests(
        self,
        body: GenerationRequest,
        deployment: Deployment,
        prompt: tuple[int, ...],
        extra_stop: Sequence[str],
        grammar: Grammar | None,
    ) -> list[Request]:
        """Build one engine request for each answer to a prompt."""
        asked = body.rope.request() if body.rope is not None else RopeRequest()
        max_tokens = body.asked_max_tokens
        if max_tokens is None:
            max_tokens = deployment.open_max_tokens(asked, len(prompt), self.max_len)
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"`min_tokens` must be <= `max_tokens` ({max_tokens}). Given: {body.min_tokens}",
                param="min_tokens",
            )
        placement = deployment.place(asked, len(prompt), max_tokens)
        return [
            Request(
                f"{body.id_prefix}-{uuid.uuid4().hex}",
                prompt,
                sampling,
                placement,
                body.cache_salt or "",
                wants_progress=bool(body.return_progress),
                grammar=grammar,
            )
            for sampling in body.sampling(max_tokens, self.sampling_defaults, extra_stop)
        ]


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was ready."""


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
