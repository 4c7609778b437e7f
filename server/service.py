"""What the routes share: the engine, the served names, and the way of one request through them."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from model_runtime.deployment import Deployment, RopeRequest
from model_runtime.engine import Engine
from model_runtime.errors import RequestError, RopewalkError, UnknownModelError
from model_runtime.request import Output, Request
from model_runtime.tokenizer import Tokenizer
from server.errors import rejection_reason
from server.metrics import Metrics
from server.schema import CompletionRequest

Result = TypeVar("Result")


class Submission:
    """The engine's requests of one HTTP request, seen from the event loop. Close it at the end."""

    def __init__(self, engine: Engine, requests: Sequence[Request], arrived: float) -> None:
        self.requests = requests
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        listeners = [partial(self._hand_over, index) for index in range(len(requests))]
        engine.submit_all(list(zip(requests, listeners, strict=True)), arrived)
        self._open = set(range(len(requests)))

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(index of the request, output) as they come; each request's last has a finish_reason."""
        while self._open:
            index, output = await self._outputs.get()
            if output.finish_reason is not None:
                self._open.discard(index)
            yield index, output

    def close(self) -> None:
        """Abort what is not over: its pages are free after the current step."""
        for index in self._open:
            self._engine.abort(self.requests[index].request_id)
        self._open.clear()

    def _hand_over(self, index: int, output: Output) -> None:
        # On the engine's thread. The loop may be gone when the process is ending.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))


@dataclass(frozen=True, slots=True)
class Service:
    """One engine behind one or more served names."""

    engine: Engine
    tokenizer: Tokenizer
    deployments: Mapping[str, Deployment]  # the first serves requests that name no model
    metrics: Metrics
    vocab_size: int
    sampling_defaults: Mapping[str, float]  # the model's own, for what a request leaves out
    max_len: int  # positions of the longest sequence, whatever the deployment
    created: int = field(default_factory=lambda: int(time.time()))

    def deployment(self, name: str | None) -> Deployment:
        """The deployment of that name. Raises UnknownModelError."""
        if name is None:
            return next(iter(self.deployments.values()))
        if name not in self.deployments:
            served = ", ".join(self.deployments)
            raise UnknownModelError(
                f"The model {name!a} does not exist. Served: {served}.", param="model"
            )
        return self.deployments[name]

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; off the event loop, since a long one takes a while.

        A text that must be too long, whatever its tokens, is refused before. RequestError.
        """
        most = self.max_len * self.tokenizer.longest_token
        if len(text) > most:
            raise RequestError(
                f"`prompt` must be at most {most} characters ({self.max_len} tokens of at most "
                f"{self.tokenizer.longest_token}). Given: {len(text)}",
                param="prompt",
                code="context_length_exceeded",
            )
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def submit(self, body: CompletionRequest) -> Submission:
        """Tokenise, place and queue a request. Raises what the engine and placement raise."""
        arrived = time.monotonic()
        try:
            deployment = self.deployment(body.model)
            prompts = [await self._prompt_ids(prompt) for prompt in body.prompts()]
            for token_id, _ in body.logit_bias_pairs():
                self._check_token_id(token_id, "logit_bias")
            for token_id in body.stop_token_ids or ():
                self._check_token_id(token_id, "stop_token_ids")
            asked = body.rope.request() if body.rope is not None else RopeRequest()
            requests = []
            samplings = [body.sampling(self.sampling_defaults, at) for at in range(body.n or 1)]
            for prompt in prompts:
                placement = deployment.place(asked, len(prompt), samplings[0].max_tokens)
                for sampling in samplings:
                    request_id = f"cmpl-{uuid.uuid4().hex}"
                    salt = body.cache_salt or ""
                    requests.append(Request(request_id, prompt, sampling, placement, salt))
            return Submission(self.engine, requests, arrived)
        except RopewalkError as error:
            self.metrics.rejected(rejection_reason(error))
            raise

    async def _prompt_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(await self.tokenize(prompt))
        self._check_token_id(max(prompt), "prompt")
        return tuple(prompt)

    def _check_token_id(self, token_id: int, param: str) -> None:
        if token_id >= self.vocab_size:
            raise RequestError(
                f"`{param}` token ids must be < {self.vocab_size}. Given: {token_id}", param=param
            )


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was ready."""


async def until_disconnect(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """The work's result; cancels it and raises ClientDisconnectedError if the client goes."""
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
