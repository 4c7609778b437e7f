"""What the routes share: the engine, the served names, and the way of one request through them."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
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
    """A request in the engine, seen from the event loop. Close it, however it ends."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._is_over = False
        engine.submit(request, self._hand_over)

    async def outputs(self) -> AsyncIterator[Output]:
        """Outputs as they come; the last has a finish_reason."""
        while not self._is_over:
            output = await self._outputs.get()
            self._is_over = output.finish_reason is not None
            yield output

    def close(self) -> None:
        """Abort the request if it is not over: its pages are free after the current step."""
        if not self._is_over:
            self._is_over = True
            self._engine.abort(self.request.request_id)

    def _hand_over(self, output: Output) -> None:
        # On the engine's thread. The loop may be gone when the process is ending.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)


@dataclass(frozen=True, slots=True)
class Service:
    """One engine behind one or more served names."""

    engine: Engine
    tokenizer: Tokenizer
    deployments: Mapping[str, Deployment]  # the first serves requests that name no model
    metrics: Metrics
    vocab_size: int
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
        """Token ids of a text; off the event loop, since a long one takes a while."""
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def submit(self, body: CompletionRequest) -> Submission:
        """Tokenise, place and queue a request. Raises what the engine and placement raise."""
        try:
            deployment = self.deployment(body.model)
            prompt_ids = await self._prompt_ids(body)
            sampling = body.sampling()
            asked = body.rope.request() if body.rope is not None else RopeRequest()
            placement = deployment.place(asked, len(prompt_ids), sampling.max_tokens)
            request_id = f"cmpl-{uuid.uuid4().hex}"
            request = Request(request_id, tuple(prompt_ids), sampling, placement)
            return Submission(self.engine, request)
        except RopewalkError as error:
            self.metrics.rejected(rejection_reason(error))
            raise

    async def _prompt_ids(self, body: CompletionRequest) -> list[int]:
        if isinstance(body.prompt, str):
            return await self.tokenize(body.prompt)
        for token_id in body.prompt:
            if token_id >= self.vocab_size:
                raise RequestError(
                    f"`prompt` token ids must be < {self.vocab_size}. Given: {token_id}",
                    param="prompt",
                )
        return body.prompt


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
