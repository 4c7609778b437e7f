"""Requests end once, are counted once and give their places back, whatever replicas do."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Placement
from ropewalk.model_runtime.errors import EngineStoppedError, QueueFullError, RequestError
from ropewalk.model_runtime.request import FinishReason, Output, Request, SamplingParams
from ropewalk.rope import Profile, Tier, Unscaled
from ropewalk.server.replicas.remote_engine import CONTINUED, LOST_REASONS, ReplicaLostError, Take
from ropewalk.server.replicas.wire import FULL
from tests.server.replicas.lossy import NONE_READY, Client, run, until


@pytest.fixture(autouse=True, scope="module")
def _log_lines() -> Iterator[None]:
    """Keep the log lines out of the report: a traceback takes half a second to print."""
    with structlog.testing.capture_logs():
        yield


TIER = Tier(128, 1.0, Profile(Unscaled()))
CONFIG = EngineConfig(kv_cache_tokens=256, max_model_len=128, max_num_seqs=4, max_queued_requests=4)
NUM_TOKENS = 3


def request_of(name: str, num_prompt_tokens: int = 2) -> Request:
    """A request of three tokens."""
    placement = Placement("m", TIER, (), "fixed", None, 128)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    return Request(name, tuple(range(num_prompt_tokens)), sampling, placement)


@dataclass(frozen=True)
class Attempt:
    """The way of a request on one replica: some tokens of its answer, and then an end."""

    num_tokens: int
    end: str  # answered, failed, refused, crashed, hangs, or one of LOST_REASONS


class Planned:
    """Replicas that do what a test has planned; without a plan they answer."""

    def __init__(self) -> None:
        self.num_ready = 2
        self.num_queued_tokens = 0
        self.attempts: dict[str, list[Attempt]] = {}
        self.avoided: list[frozenset[str]] = []
        self.num_open = 0

    async def run(
        self, request: Request, waited_s: float, avoid: frozenset[str], take: Take
    ) -> None:
        """Follow the plan of a request."""
        assert waited_s >= 0
        self.avoided.append(avoid)
        self.num_open += 1
        try:
            await self._follow(request, f"replica-{len(avoid)}", take)
        finally:
            self.num_open -= 1

    async def _follow(self, request: Request, replica: str, take: Take) -> None:
        planned = self.attempts.get(request.request_id)
        attempt = planned.pop(0) if planned else Attempt(NUM_TOKENS - 1, "answered")
        for token in range(attempt.num_tokens):
            await asyncio.sleep(0)
            take(Output(text="a", token_ids=(token,), tier=TIER))
        await asyncio.sleep(0)
        match attempt.end:
            case "answered":
                for token in range(attempt.num_tokens, NUM_TOKENS - 1):
                    take(Output(text="a", token_ids=(token,), tier=TIER))
                last = Output(text="z", token_ids=(9,), tier=TIER)
                take(last._replace(finish_reason=FinishReason.LENGTH))
            case "failed":
                take(Output(finish_reason=FinishReason.ERROR, error="out of chalk", tier=TIER))
            case "refused":
                raise RequestError("The request is too long.")
            case "crashed":
                raise ZeroDivisionError
            case "hangs":
                await asyncio.Event().wait()
            case "none_ready":
                raise NONE_READY
            case reason:
                raise ReplicaLostError(replica, reason)


def client_of(replicas: Planned, **numbers: int) -> Client:
    """A client of planned replicas."""
    return Client(replicas, CONFIG, **numbers)


def lost(*attempts: tuple[int, str]) -> list[Attempt]:
    """Attempts by tokens and end."""
    return [Attempt(*each) for each in attempts]


@pytest.mark.parametrize("reason", [each for each in LOST_REASONS if each != "none_ready"])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_lost_request_goes_on_elsewhere_and_is_counted_by_reason(
    reason: str, num_tokens: int
) -> None:
    """Replicas that have lost it are avoided; one that was full may have room again."""

    async def test() -> None:
        replicas = Planned()
        replicas.attempts["r"] = lost((num_tokens, reason), (num_tokens, reason))
        client = client_of(replicas)
        client.submit(request_of("r"))
        await client.all_ended()
        assert "".join(each.text for each in client.outputs["r"]) == "aaz"
        avoided = [set(), {"replica-0"}, {"replica-0", "replica-1"}]
        assert replicas.avoided == ([set()] * 3 if reason == FULL else avoided)
        assert client.counts.lost_by == {(reason, num_tokens > 0): 2}
        assert client.counts.outcomes == {"ok": 1}
        assert client.counts.finished_by == {FinishReason.LENGTH: 1}

    run(test)


@pytest.mark.parametrize("most_attempts", [0, 1, 3])
def test_a_request_that_loses_too_many_replicas_ends_with_an_error(most_attempts: int) -> None:
    """Its error names the last reason."""

    async def test() -> None:
        replicas = Planned()
        replicas.attempts["r"] = lost(*[(1, "died")] * 9)
        client = client_of(replicas, most_attempts=most_attempts)
        client.submit(request_of("r"))
        await client.all_ended()
        last = client.outputs["r"][-1]
        assert last.error == "the replica of the request was lost (died)"
        assert len(replicas.avoided) == most_attempts + 1
        assert client.counts.outcomes == {"gave_up": 1}
        assert client.num_flushes == 1
        assert client.num_admitted == 0

    run(test)


def test_a_request_is_not_tried_again_if_no_replica_became_ready() -> None:
    """It has waited for one already."""

    async def test() -> None:
        replicas = Planned()
        replicas.attempts["r"] = lost((0, "none_ready"))
        client = client_of(replicas)
        client.submit(request_of("r"))
        await client.all_ended()
        assert len(replicas.avoided) == 1
        assert client.counts.lost_by == {("none_ready", False): 1}
        assert client.counts.outcomes == {"gave_up": 1}

    run(test)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("failed", "out of chalk"),
        ("refused", "The request is too long."),
        ("crashed", "ZeroDivisionError between the API and an engine"),
    ],
)
def test_errors_end_a_request_with_their_sentence(end: str, error: str) -> None:
    """After a lost replica, too; another replica would say the same."""

    async def test() -> None:
        replicas = Planned()
        replicas.attempts["r"] = lost((2, "died"), (1, end))
        client = client_of(replicas)
        client.submit(request_of("r"))
        await client.all_ended()
        assert client.outputs["r"][-1].error == error
        assert client.counts.outcomes == {"failed": 1}
        assert client.counts.finished_by == {FinishReason.ERROR: 1}

    run(test)


def test_without_a_ready_replica_nothing_is_accepted() -> None:
    """The place is refused at once; one that is ready again is used."""

    async def test() -> None:
        replicas = Planned()
        client = client_of(replicas)
        replicas.num_ready = 0
        assert client.engine.is_running
        assert not client.engine.is_ready
        with pytest.raises(EngineStoppedError, match="No replica of the engine is ready"):
            client.submit(request_of("r"))
        assert client.num_admitted == 0
        replicas.num_ready = 1
        client.submit(request_of("r"))
        await client.all_ended()
        client.engine.stop()
        with pytest.raises(EngineStoppedError, match="The engine is not running"):
            client.submit(request_of("late"))

    run(test)


def test_the_limits_of_the_queue_hold_for_each_ready_replica() -> None:
    """Two replicas run and queue twice as much as one."""

    async def test() -> None:
        replicas = Planned()
        client = client_of(replicas)
        most = 2 * (CONFIG.max_num_seqs + CONFIG.max_queued_requests)
        for number in range(most):
            replicas.attempts[f"{number}"] = lost((0, "hangs"))
            client.submit(request_of(f"{number}"))
        with pytest.raises(QueueFullError, match="8 requests are waiting; at most 8 may"):
            client.submit(request_of("one more"))
        client.engine.abort("0")
        await until(lambda: client.num_admitted == most - 1)
        client.submit(request_of("one more"))
        client.engine.stop()
        await client.all_ended()

    run(test)


def test_the_limit_of_queued_tokens_holds_for_each_ready_replica() -> None:
    """A prompt of any length is accepted if nothing waits."""

    async def test() -> None:
        replicas = Planned()
        config = EngineConfig(kv_cache_tokens=256, max_model_len=128, max_queued_prompt_tokens=50)
        client = Client(replicas, config)
        client.submit(request_of("long", 120))
        replicas.num_queued_tokens = 60
        client.submit(request_of("fits", 40))
        with pytest.raises(QueueFullError, match=r"60 prompt tokens are waiting.*more than 100 "):
            client.submit(request_of("too many", 41))
        await client.all_ended()

    run(test)


def test_a_request_that_no_replica_can_serve_is_refused_at_once() -> None:
    """All of the requests that came with it are refused, too."""

    async def test() -> None:
        replicas = Planned()
        client = client_of(replicas)
        with pytest.raises(RequestError, match="kv_cache_tokens"):
            client.submit(request_of("good"), request_of("long", 300))
        assert client.num_admitted == 0
        await asyncio.sleep(0)
        assert replicas.avoided == []

    run(test)


def test_an_abort_after_a_loss_is_an_outcome() -> None:
    """Lost requests add up with their outcomes."""

    async def test() -> None:
        replicas = Planned()
        replicas.attempts["r"] = lost((1, "died"), (1, "hangs"))
        client = client_of(replicas)
        client.submit(request_of("r"))
        await until(lambda: len(replicas.avoided) == 2)
        client.engine.abort("r")
        await client.all_ended()
        assert client.counts.outcomes == {"aborted": 1}

    run(test)


ENDS = ["answered", "failed", "refused", "crashed", "hangs", *LOST_REASONS]
ATTEMPTS = st.builds(Attempt, st.integers(0, NUM_TOKENS - 1), st.sampled_from(ENDS))
EVENTS = st.lists(
    st.one_of(
        st.lists(st.lists(ATTEMPTS, max_size=5), min_size=1, max_size=3),  # submitted together
        st.integers(0, 9).map(lambda number: f"{number}"),  # aborted
        st.integers(1, 4),  # turns of the event loop
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.booleans())
def test_places_return_and_counters_add_up_after_any_mix(
    events: list[list[list[Attempt]] | str | int],
    is_stopped: bool,  # noqa: FBT001
) -> None:
    """Answers, errors, losses, aborts at any moment, and an end of all."""

    async def test() -> None:
        replicas, num_accepted = Planned(), 0
        client = client_of(replicas)
        for event in events:
            if isinstance(event, str):
                client.engine.abort(event)
            elif isinstance(event, int):
                for _ in range(event):
                    await asyncio.sleep(0)
            else:
                names = [f"{num_accepted + at}" for at in range(len(event))]
                replicas.attempts.update(zip(names, event, strict=True))
                try:
                    client.submit(*map(request_of, names))
                except QueueFullError:
                    continue
                num_accepted += len(event)
        await end(client, is_stopped=is_stopped)
        assert client.num_admitted == replicas.num_open == 0
        counts = client.counts
        delivered = [each for outputs in client.outputs.values() for each in outputs]
        assert counts.finished_by.total() == num_accepted
        assert counts.num_tokens == counts.num_generated
        assert counts.num_tokens == sum(len(each.token_ids) for each in delivered)
        assert counts.outcomes.keys() <= set(CONTINUED)
        assert counts.outcomes.total() <= counts.lost_by.total()
        assert bool(counts.outcomes) == bool(counts.lost_by)
        for outputs in client.outputs.values():
            text = "".join(each.text for each in outputs)
            assert "aaz".startswith(text)
            assert (text == "aaz") == (outputs[-1].finish_reason is FinishReason.LENGTH)

    run(test)


async def end(client: Client, *, is_stopped: bool) -> None:
    """End the requests that hang, after the others."""
    for _ in range(60):
        await asyncio.sleep(0)
    if is_stopped:
        client.engine.stop()
    else:
        for name in client.outputs:
            client.engine.abort(name)
    await client.all_ended()
