"""Replicas in this process that lose requests as a test says, and clients of theirs."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.request import FinishReason, Output, Request
from ropewalk.rope import Tier
from ropewalk.server.replicas.remote_engine import RemoteEngine, ReplicaLostError, Replicas, Take
from ropewalk.server.replicas.wire import OutputDecoder, OutputEncoder, SentRequest

LIMIT_S = 30.0  # for anything here
NONE_READY = ReplicaLostError(None, "none_ready")


class EngineReplicas:
    """Real engines as replicas. Each attempt of a request may be lost after some outputs."""

    def __init__(self, engines: Sequence[Engine], losses: Sequence[int] = ()) -> None:
        """Take the number of outputs after which each request loses its first, second... run."""
        self._engines = {f"replica-{number}": each for number, each in enumerate(engines)}
        self.losses = losses
        self.reason = "died"
        self._num_runs = Counter[str]()
        self.served: list[tuple[str, frozenset[str]]] = []  # replica, and those to avoid
        self.open: set[str] = set()  # names of runs

    @property
    def num_ready(self) -> int:
        """Return the number of replicas that take requests."""
        return sum(each.is_running for each in self._engines.values())

    num_queued_tokens = 0

    async def run(
        self, request: Request, waited_s: float, avoid: frozenset[str], take: Take
    ) -> None:
        """Run a request on the first replica that may have it, over the real encoding."""
        replica = next((each for each in self._engines if each not in avoid), None)
        if replica is None:
            raise NONE_READY
        self.served.append((replica, avoid))
        attempt = self._num_runs[request.request_id]
        self._num_runs[request.request_id] += 1
        limit = self.losses[attempt] if attempt < len(self.losses) else None
        engine, loop = self._engines[replica], asyncio.get_running_loop()
        key = f"{request.request_id}/{attempt}"
        encoder, decoder = OutputEncoder(), OutputDecoder()
        arrived: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

        def on_output(output: Output) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, encoder.encode(output))

        sent = SentRequest.of(replace(request, request_id=key), waited_s)
        self.open.add(key)
        try:
            engine.submit_all(
                [(replace(sent.request, grammar=request.grammar), on_output)],
                time.monotonic() - waited_s,
            )
            num_taken = 0
            while num_taken != limit:
                output = decoder.decode(await arrived.get())
                take(output)
                num_taken += 1
                if output.finish_reason is not None:
                    return
            raise ReplicaLostError(replica, self.reason)
        finally:
            self.open.discard(key)
            engine.abort(key)


@dataclass
class Counts(Observer):
    """The calls that a remote engine made of its observer and its watch."""

    num_started: int = 0
    num_cached: int = 0
    num_first: int = 0
    num_next: int = 0
    context_lens: list[int] = field(default_factory=list)
    finished_by: Counter[FinishReason] = field(default_factory=Counter)
    num_generated: int = 0
    lost_by: Counter[tuple[str, bool]] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        """The tokens that were counted one by one."""
        return self.num_first + self.num_next

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Count a start."""
        self.num_started += 1
        self.num_cached += num_cached_tokens

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """Count a first token."""
        assert seconds >= 0
        self.num_first += 1

    def next_token(self, request: Request, context_len: int, seconds: float) -> None:
        """Count another token."""
        self.context_lens.append(context_len)
        self.num_next += 1

    def finished(
        self, request: Request, tier: Tier, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """Count an end."""
        self.finished_by[reason] += 1
        self.num_generated += num_generated

    def lost(self, reason: str, *, has_begun: bool) -> None:
        """Count a lost replica."""
        self.lost_by[reason, has_begun] += 1

    def continued(self, outcome: str) -> None:
        """Count the outcome of a request that had lost one."""
        self.outcomes[outcome] += 1


class Client:
    """A started remote engine, and the outputs of each of its requests."""

    def __init__(
        self,
        replicas: Replicas,
        config: EngineConfig,
        *,
        most_attempts: int = 3,
    ) -> None:
        """Start it; call it on the event loop."""
        self.counts = Counts()
        self.engine = RemoteEngine(
            config, replicas, self.counts, self.counts, most_attempts=most_attempts
        )
        self.outputs: dict[str, list[Output]] = {}
        self.num_flushes = 0
        self.engine.start(after_step=self._flush)

    def _flush(self) -> None:
        self.num_flushes += 1

    def submit(self, *requests: Request) -> None:
        """Start requests together, in places of their own."""
        outputs: dict[str, list[Output]] = {each.request_id: [] for each in requests}
        with self.engine.reserve(len(requests)) as places:
            self.engine.submit_all(
                [(each, outputs[each.request_id].append) for each in requests],
                time.monotonic(),
                places,
            )
        self.outputs.update(outputs)

    async def all_ended(self) -> None:
        """Wait for the ends of all requests, and for their tasks."""
        await until(lambda: not self.engine._tasks)
        for outputs in self.outputs.values():
            assert outputs[-1].finish_reason is not None
            assert [each.finish_reason for each in outputs[:-1]] == [None] * (len(outputs) - 1)

    @property
    def num_admitted(self) -> int:
        """The requests that take a place in the queue, and the places that are reserved."""
        admission = self.engine._admission
        return admission._num_submitted + admission._num_reserved


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110  # a condition of any kind
        await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on an event loop."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())
