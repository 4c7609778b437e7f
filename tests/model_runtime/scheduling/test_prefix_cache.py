"""Shared prefixes change the work of a step, never its result."""

import itertools
import random
import threading
from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Output, Request
from ropewalk.model_runtime.scheduling.prefix_cache import extend_keys
from ropewalk.rope import POLICIES, Linear, Profile, SelfExtend, Tier, Unscaled
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, num_same, request

YARN = {"rope_type": "yarn", "factor": 8.0}
PREFIX = [(3 * at * at + 5) % VOCAB_SIZE for at in range(130)]


def cached(engine: Engine, *requests: Any) -> list[int]:
    """The number of prompt tokens that each found in the cache, served one after the other."""
    return [engine.generate([each])[0][-1].num_cached_tokens for each in requests]


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_a_shared_prefix_gives_the_tokens_of_an_unshared_one(
    engines: EngineFactory, llama_checkpoint: Checkpoint, page_size: int
) -> None:
    """Answers have equal bits for every page size; pages of generated tokens are shared too."""
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN)
    options: dict[str, Any] = {"max_tokens": 20, "logprobs": 4}
    wide = RopeRequest(factor=8.0, policy="fixed")  # one profile for all lengths
    first = request(deployment, PREFIX, wide, **options)
    fresh = engines.over(llama_checkpoint, page_size=page_size)
    alone = answer(fresh, first)[0]
    follow_up = [*PREFIX, *alone.token_ids, 5, 6, 7]
    others = [PREFIX + [9] * 7, PREFIX[:100] + [8] * 40, follow_up]
    expected = [
        answer(
            engines.over(llama_checkpoint, page_size=page_size),
            request(deployment, each, wide, **options),
        )[0]
        for each in others
    ]
    engine = engines.over(llama_checkpoint, page_size=page_size)
    answer(engine, first)
    outputs = engine.generate([request(deployment, each, wide, **options) for each in others])
    assert [Result.of(each) for each in outputs] == expected
    found = [each[-1].num_cached_tokens for each in outputs]
    full = [130, 100, 149]  # the last generated token was never computed
    assert found == [length // page_size * page_size for length in full]


def test_another_profile_or_salt_reads_nothing(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The same tokens find their pages only under the profile and salt that wrote them."""
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN)
    logn = deployment_of(llama_checkpoint, rope_scaling={**YARN, "use_logn_attn": True})

    def asked(factor: float, salt: str = "", which: Any = deployment, **options: Any) -> Any:
        rope = RopeRequest(factor=factor, policy="fixed")
        return request(which, PREFIX, rope, salt, max_tokens=1, **options)

    engine = engines.over(llama_checkpoint)
    first = [asked(4.0), asked(8.0), asked(4.0, "a"), asked(4.0, "b"), asked(4.0, which=logn)]
    linear = request(deployment, PREFIX, RopeRequest("linear", 4.0, "fixed"), max_tokens=1)
    assert cached(engine, *first, linear) == [0] * 6
    again = [asked(4.0), asked(8.0), asked(4.0, "a"), asked(4.0, "b"), asked(4.0, which=logn)]
    assert cached(engine, *again) == [128] * 5
    assert cached(engine, asked(4.0, prompt_logprobs=1)) == [0]


def test_the_untouched_table_is_shared_by_all_methods(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Below L, every deployment has the same profile."""
    yarn = deployment_of(llama_checkpoint, rope_scaling=YARN)
    linear = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "linear", "factor": 2.0})
    prompt = PREFIX[:40]
    engine = engines.over(llama_checkpoint)
    assert cached(
        engine,
        request(yarn, prompt, max_tokens=1),
        request(linear, prompt, max_tokens=1),
        request(yarn, prompt, RopeRequest("default"), max_tokens=1),
    ) == [0, 32, 32]


def test_requests_at_once_compute_their_common_prompt_once(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The copies of a request with n > 1 arrive at once and have one prompt."""
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN)
    engine = engines.over(llama_checkpoint, max_num_batched_tokens=64)
    outputs: list[list[Output]] = engine.generate(
        [
            request(deployment, PREFIX, max_tokens=5, temperature=1.0, seed=seed, min_tokens=5)
            for seed in range(6)
        ]
    )
    assert sorted(each[-1].num_cached_tokens for each in outputs) == [0, *[128] * 5]
    assert len({Result.of(each).token_ids for each in outputs}) > 1


def test_a_grow_sequence_publishes_nothing_after_a_crossing(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Pages after a crossing hold a history of two profiles, so they are not published."""
    grow = deployment_of(llama_checkpoint, rope_scaling=YARN, rope_policy="grow")
    engine = engines.over(llama_checkpoint)
    prompt = PREFIX[:50]
    result = answer(engine, request(grow, prompt, max_tokens=60))[0]
    assert result.num_rescales == 1
    published = engine._core.scheduler.pages.index.published()
    assert len(published) == 4  # the 64 positions of the native tier
    follow_up = [*prompt, *result.token_ids]
    assert cached(engine, request(grow, follow_up, max_tokens=1)) == [0]


def crowd(checkpoint: Checkpoint, rng: random.Random, num_requests: int) -> list[Request]:
    """Requests over all policies and methods, with random lengths and some shared beginnings."""
    deployments = [
        deployment_of(checkpoint, rope_scaling=YARN, rope_policy=policy) for policy in POLICIES
    ]
    requests = []
    for _ in range(num_requests):
        method = rng.choice([None, None, "linear", "ntk", "dynamic", "llama3", "default"])
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        requests.append(
            request(
                rng.choice(deployments),
                PREFIX[: rng.randrange(100)] + own,
                RopeRequest(method),
                rng.choice(["", "", "a"]),
                max_tokens=rng.choice([0, 1, 10, 40, 90]),
                temperature=rng.choice([0.0, 0.9]),
                seed=rng.randrange(10**6),
                repetition_penalty=rng.choice([1.0, 1.2]),
                logprobs=2,
                prompt_logprobs=rng.choice([None, None, 1]),
            )
        )
    return requests


class Watched(Observer):
    """An observer that counts preemptions."""

    def __init__(self) -> None:
        self.num_preemptions = 0

    def preempted(self, request: Request) -> None:
        """Count one preemption."""
        self.num_preemptions += 1


def serve_all(engine: Engine, requests: list[Request], cancelled: set[int]) -> list[list[Output]]:
    """Serve all at once; some are aborted at once, others a little later."""
    outputs: list[list[Output]] = [[] for _ in requests]
    done = threading.Semaphore(0)

    def listener(at: int) -> Any:
        def listen(output: Output) -> None:
            outputs[at].append(output)
            if output.finish_reason is not None:
                done.release()

        return listen

    for at, each in enumerate(requests):
        engine.submit(each, listener(at))
        if at in cancelled and at % 2:
            engine.abort(each.request_id)
    for at in cancelled:
        engine.abort(requests[at].request_id)
    for _ in requests:
        assert done.acquire(timeout=120)
    return outputs


@pytest.mark.parametrize(
    ("num_requests", "seed"), [pytest.param(300, 1, marks=pytest.mark.long), (40, 2)]
)
def test_a_crowd_in_a_fifth_of_the_cache_it_needs(
    engines: EngineFactory, llama_checkpoint: Checkpoint, num_requests: int, seed: int
) -> None:
    """Every answer equals that of a large cache, though sequences are preempted and aborted.

    The integrity check runs after every step, and all pages are free at the end.
    """
    rng = random.Random(seed)
    requests = crowd(llama_checkpoint, rng, num_requests)
    cancelled = set(rng.sample(range(num_requests), num_requests // 10))
    large = engines.over(llama_checkpoint, kv_cache_tokens=65_536)
    expected = {
        at: answer(large, each)[0] for at, each in enumerate(requests) if at not in cancelled
    }

    watched, num_seqs = Watched(), 24
    at_once = sorted((each.num_positions for each in requests), reverse=True)[:num_seqs]
    small = engines.over(
        llama_checkpoint,
        observer=watched,
        kv_cache_tokens=sum(at_once) // 5,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=96,
        max_num_logit_rows=64,
        max_queued_requests=400,
    )
    core = small._core
    plain_step = core.step

    def checked_step() -> int:
        count = plain_step()
        core.check_integrity()
        return count

    core.step = checked_step  # type: ignore[method-assign]
    outputs = serve_all(small, requests, cancelled)
    for at, result in expected.items():
        assert Result.of(outputs[at]) == result, at
    assert watched.num_preemptions >= num_requests // 20, "the cache was never short"
    assert core.scheduler.pool.num_used == 0
    assert not core.scheduler.waiting


def test_a_page_over_the_end_of_a_tier_has_a_key_of_both() -> None:
    """Keys differ if a tier ends elsewhere in the page, or nowhere."""
    low, high = Profile(Unscaled()), Profile(Linear(factor=4.0))

    def keys(*tiers: Tier) -> list[bytes]:
        found: list[bytes] = []
        extend_keys(found, range(160), 5, 32, tiers=tiers, cache_salt="")
        return found[1:]

    last = Tier(1024, 4.0, high)
    told = {end: keys(Tier(end, 1.0, low), last) for end in (64, 70, 80, 96)}
    alone = keys(Tier(1024, 1.0, low))
    for end, found in told.items():
        assert num_same(found, alone) == end // 32
    for (end, found), (other_end, other) in itertools.combinations(told.items(), 2):
        assert num_same(found, other) == min(end, other_end) // 32
    assert keys(Tier(64, 1.0, low), Tier(96, 1.0, low)) == alone


@pytest.mark.parametrize(("window", "num_alike"), [(32, 1), (63, 1), (64, 2), (8, 0)])
def test_pages_whose_states_are_native_have_native_keys(window: int, num_alike: int) -> None:
    """A page with one position behind the method's native part is the method's own."""
    method = Profile(Unscaled(), positions=SelfExtend(window=window, group=4))
    found: dict[Profile, list[bytes]] = {}
    for profile in (method, method.native):
        keys: list[bytes] = []
        extend_keys(keys, range(160), 5, 32, tiers=[Tier(1024, 1.0, profile)], cache_salt="")
        found[profile] = keys[1:]
    assert num_same(found[method], found[method.native]) == num_alike
    assert set(found[method][num_alike:]).isdisjoint(found[method.native])
