"""Runs requests on the replicas of a Ray Serve deployment, through its handle."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from ropewalk.model_runtime.errors import RopewalkError
from ropewalk.model_runtime.request import Request
from ropewalk.server.replicas.channel import OutputChannel
from ropewalk.server.replicas.prompt_pages import PromptPages, prompt_pages
from ropewalk.server.replicas.remote_engine import ReplicaLostError, Take
from ropewalk.server.replicas.routes import Asked, Routes
from ropewalk.server.replicas.wire import ACCEPTED, OutputDecoder, SentRequest

# Ray has several names for a replica that has gone.
GONE = (RayActorError, RayServeException, RequestCancelledError, grpc.aio.AioRpcError)


class RayReplicas:
    """The replicas behind a handle; see `Replicas`."""

    def __init__(
        self,
        handle: DeploymentHandle,
        routes: Routes,
        page_size: int,
        after_message: Callable[[], None],
        *,
        wait_s: float,
        silence_s: float,
    ) -> None:
        """Take how long a request waits for a replica, and how long a replica may be silent."""
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._routes = routes
        self._page_size = page_size
        self._after_message = after_message  # called when the outputs of a step were taken
        self._wait_s, self._silence_s = wait_s, silence_s
        self._name = uuid.uuid4().hex  # of this process
        self._numbers = itertools.count()
        self._channels: dict[str, OutputChannel] = {}
        routes.on_update = self._close_idle_channels
        # Called with the predicted cached tokens of each request that a replica took.
        self.on_routed: Callable[[int], None] = lambda _: None

    @property
    def num_ready(self) -> int:
        return len(self._routes.choice.replicas)

    @property
    def num_queued_tokens(self) -> int:
        choice = self._routes.choice
        return sum(choice.load(replica)[0] for replica in choice.replicas)

    async def run(
        self, request: Request, waited_s: float, avoid: frozenset[str], take: Take
    ) -> None:
        """Run a request on a replica, but not on one of `avoid`, until its last output.

        `take` gets the outputs. Raises what it raises, ReplicaLostError, or a RopewalkError of the
        engine.
        """
        await self._wait_for_other(avoid)
        run = _Run(next(self._numbers), request, self._routes, take)
        run.expire_after(self._wait_s)
        tried = partial(self._tried, run)
        self._routes.begin(run.key, Asked(self._pages_of(request), avoid, tried))
        stream = self._streaming.generate.remote(
            SentRequest.of(replace(request, request_id=run.key), waited_s),
            request_id=run.key,
            run=run.number,
            api=self._name,
        )
        following = asyncio.ensure_future(self._follow(run, stream))
        try:
            await run.ended
        finally:
            run.close()
            following.cancel()
            stream.cancel()
            self._routes.end(run.key)
            self._close_idle_channels()

    async def _wait_for_other(self, avoid: frozenset[str]) -> None:
        """Wait for a replica that is not to be avoided. Raises ReplicaLostError.

        Not in the router: the few requests that it looks at would stop all others.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._routes.other_than(avoid)
        except TimeoutError as error:
            raise ReplicaLostError(None, "none_ready") from error

    async def _follow(self, run: "_Run", stream: AsyncIterator[str]) -> None:
        """Join the channel of the replica that accepts the run, and hear of its failures."""
        try:
            async for message in stream:
                replica = self._routes.replica_of(run.key)
                if message != ACCEPTED or replica is None:
                    run.lose(ReplicaLostError(replica, message))
                    return
                self._routes.heard(replica)
                self.on_routed(self._routes.num_predicted(run.key))
                run.accepted(self._channel_of(replica))
            # The engine has ended the request: if its last output was lost, none comes any more.
            run.expire_after(self._silence_s)
        except RayTaskError as error:
            run.fail(error.cause if isinstance(error.cause, RopewalkError) else error)
        except GONE:
            run.lose(ReplicaLostError(self._routes.replica_of(run.key), "died"))
        except Exception as error:  # noqa: BLE001  # it ends this request only
            run.fail(error)

    def _tried(self, run: "_Run") -> None:
        """Listen to a replica before it is asked, because outputs may come before its answer."""
        replica = self._routes.replica_of(run.key)
        if replica is not None:
            run.join(self._channel_of(replica))
            run.expire_after(self._silence_s)

    def _channel_of(self, replica: str) -> OutputChannel:
        channel = self._channels.get(replica)
        if channel is None or not channel.is_open:
            channel = self._channels[replica] = OutputChannel(
                replica,
                self._streaming.outputs.remote(api=self._name, replica=replica),
                self._after_message,
                silence_s=self._silence_s,
                gone=GONE,
            )
        return channel

    def _close_idle_channels(self) -> None:
        """Close the channels of replicas that take no more requests, so that they can end."""
        for replica in self._channels.keys() - set(self._routes.choice.replicas):
            channel = self._channels[replica]
            if not channel.num_receivers:
                channel.close()
                del self._channels[replica]

    def _pages_of(self, request: Request) -> PromptPages:
        return prompt_pages(
            request.prompt_ids,
            request.placement.prompt_tiers,
            request.cache_salt,
            self._page_size,
            is_scored=request.sampling.prompt_logprobs is not None,
        )

    async def collect(self) -> dict[str, Sequence[Metric]]:
        """Return the metrics of each replica that answers."""
        replicas = self._routes.choice.replicas
        found = await asyncio.gather(
            *(self._collected(replica) for replica in replicas), return_exceptions=True
        )
        pairs = zip(replicas, found, strict=True)
        return {replica: each for replica, each in pairs if not isinstance(each, BaseException)}

    async def _collected(self, replica: str) -> Sequence[Metric]:
        async with asyncio.timeout(self._silence_s):
            metrics: Sequence[Metric] = await self._handle.collect.remote(replica=replica)
            return metrics


class _Run:
    """One attempt to serve a request on a replica."""

    def __init__(self, number: int, request: Request, routes: Routes, take: Take) -> None:
        self.number = number
        # Another name for each attempt: a replica may still have the request of an earlier one.
        self.key = f"{request.request_id}/{number}"
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._routes, self._take = routes, take
        self._decoder = OutputDecoder()
        self._has_token = False
        self._timer: asyncio.TimerHandle | None = None
        self._channel: OutputChannel | None = None

    def expire_after(self, limit_s: float) -> None:
        """Lose the run unless a replica accepts it within the limit."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.ended.done():
            self._timer = self._loop.call_later(limit_s, self._expire)

    def join(self, channel: OutputChannel) -> None:
        """Take outputs from a channel from now on, and from no other one."""
        if self._channel is not channel and not self.ended.done():
            self.leave()
            self._channel = channel
            channel.add(self.number, self)

    def leave(self) -> None:
        if self._channel is not None:
            self._channel.remove(self.number)
            self._channel = None

    def accepted(self, channel: OutputChannel) -> None:
        """Expect outputs from the channel of the replica that has accepted the run."""
        if self._timer is not None:
            self._timer.cancel()
        self.join(channel)

    def receive(self, fields: tuple[Any, ...] | str) -> None:
        """Take an output, or the reason why there are no more. Raises MissingOutputError."""
        if self.ended.done():
            return
        if isinstance(fields, str):
            self.lose(ReplicaLostError(self._routes.replica_of(self.key), fields))
            return
        output = self._decoder.decode(fields)
        if output.token_ids and not self._has_token:
            self._has_token = True
            self._routes.choice.first_token(self.key)
        try:
            self._take(output)
        except Exception as error:  # noqa: BLE001  # it ends this request only
            self.fail(error)
            return
        if output.finish_reason is not None:
            self.ended.set_result(None)

    def lose(self, error: ReplicaLostError) -> None:
        if error.replica is not None and error.reason == "silent":
            self._routes.fell_silent(error.replica)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def close(self) -> None:
        """Take no more outputs."""
        if self._timer is not None:
            self._timer.cancel()
        self.leave()
        if self.ended.done() and not self.ended.cancelled():
            self.ended.exception()  # known, also if nothing waits for it any more

    def _expire(self) -> None:
        replica = self._routes.replica_of(self.key)
        reason = "none_ready" if replica is None else "silent"
        self.lose(ReplicaLostError(replica, reason))
