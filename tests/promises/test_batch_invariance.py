"""Promise 2: a request's tokens and logprobs do not depend on its neighbours or on chunking.

To the bit, and only if the requests verifiably share forward calls: served one by one they would
agree trivially.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from tests.checkpoints.tiny_models import VOCAB_SIZE, in_dtype, tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Result,
    answer,
    checkpoint_of,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.doubles.runner_spy import RunnerSpy
from tests.oracles.draft_adversary import Counted, tell, use_adversary

# method, factor, log-n, prompt tokens, tokens to generate; L is 64 here
MIX: list[tuple[str, float, bool, int, int]] = [
    ("default", 1.0, False, 11, 9),
    ("yarn", 2.0, False, 70, 12),
    ("yarn", 8.0, False, 400, 8),
    ("linear", 4.0, False, 200, 7),
    ("ntk", 8.0, False, 300, 10),
    ("dynamic", 4.0, False, 130, 9),
    ("llama3", 2.0, False, 90, 11),
    ("yarn", 4.0, True, 33, 12),
]


def longrope_block(pairs: int) -> dict[str, Any]:
    """A longrope block with two different lists."""
    return {
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": [1.0 + index / 10 for index in range(pairs)],
        "long_factor": [1.0 + index for index in range(pairs)],
    }


class SharedForwards:
    """Counts the sequences and profiles in each of an engine's forward calls."""

    def __init__(self, engine: Engine) -> None:
        self.profiles_per_call: list[int] = []
        self.num_sequences_per_call: list[int] = []
        RunnerSpy(engine, self._note)

    def _note(self, spans: Sequence[Span], _: Tensor) -> None:
        self.num_sequences_per_call.append(len(spans))
        self.profiles_per_call.append(len({span.table_id for span in spans}))


def mixed_requests(checkpoint: Checkpoint, vocabulary: int, seed: int) -> list[Request]:
    """Nine requests on nine profiles, some sampled, with random prompts."""
    rng = random.Random(seed)
    plain = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    logn = deployment_of(
        checkpoint, rope_scaling={"rope_type": "yarn", "factor": 8.0, "use_logn_attn": True}
    )
    longrope = deployment_of(
        checkpoint, rope_scaling=longrope_block(checkpoint.native.rotary.num_pairs)
    )
    native_len = plain.native_len

    def made(
        deployment: Deployment, num_prompt: int, max_tokens: int, rope: RopeRequest
    ) -> Request:
        prompt = [rng.randrange(vocabulary) for _ in range(num_prompt)]
        temperature = rng.choice([0.0, 0.9])
        return request(
            deployment,
            prompt,
            rope,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=rng.randrange(10**9),
            logprobs=5,
            prompt_logprobs=rng.choice([None, 2]),
        )

    requests = []
    for rope_type, factor, use_logn, num_prompt, max_tokens in MIX:
        length = num_prompt * native_len // 64
        rope = RopeRequest(rope_type, factor, None if rope_type == "default" else "fixed")
        requests.append(made(logn if use_logn else plain, length, max_tokens, rope))
    requests.append(made(longrope, 3 * native_len, 6, RopeRequest()))
    return requests


def alone(engine: Engine, requests: list[Request]) -> list[Result]:
    """The result of each request, served by itself."""
    return [answer(engine, each)[0] for each in requests]


@pytest.mark.sampled(fixed=0, drawn=1)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_short_beside_long_on_the_embedded_model(
    embedded: Checkpoint, engines: EngineFactory, seed: int
) -> None:
    """Nine methods, factors and lengths share one batch; the reference is each request alone."""
    config = {"kv_cache_tokens": 16_384, "max_num_batched_tokens": 512}
    requests = mixed_requests(embedded, embedded.vocab_size, seed)
    expected = alone(engines.over(embedded, **config), requests)

    engine = engines.over(embedded, **config)
    watched = SharedForwards(engine)
    assert answer(engine, *requests) == expected
    # Nine requests of 84 tokens in all: alone they would take 84 calls or more.
    assert max(watched.num_sequences_per_call) >= 8
    assert max(watched.profiles_per_call) >= 7
    assert sum(each > 4 for each in watched.profiles_per_call) >= 4


@pytest.mark.sampled
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "gpt_neox", "cohere2", "gemma3_text", "gpt_oss"]
)
def test_short_beside_long_on_other_architectures(
    engines: EngineFactory, architecture: str
) -> None:
    """They have biases, partial rotary, layers without rotation, two tables, or experts."""
    checkpoint = tiny_checkpoint(architecture)
    requests = mixed_requests(checkpoint, VOCAB_SIZE, 4)
    expected = alone(engines.over(checkpoint), requests)
    engine = engines.over(checkpoint)
    watched = SharedForwards(engine)
    assert answer(engine, *requests) == expected
    assert max(watched.num_sequences_per_call) >= 7


def test_chunk_sizes_change_nothing(embedded: Checkpoint, engines: EngineFactory) -> None:
    """Chunks of 16, 64 and 1,000 tokens answer like each request alone."""
    requests = mixed_requests(embedded, embedded.vocab_size, 5)
    expected = alone(engines.over(embedded, kv_cache_tokens=16_384), requests)
    for chunk in (16, 64, 1000):
        engine = engines.over(
            embedded,
            kv_cache_tokens=16_384,
            max_num_batched_tokens=chunk,
            max_num_logit_rows=max(16, chunk // 3),
            max_num_seqs=16,
        )
        assert answer(engine, *requests) == expected, chunk


def test_thread_counts_keep_the_promise(embedded: Checkpoint, engines: EngineFactory) -> None:
    """With three or four threads, the shares of a tensor end at odd places."""
    before = torch.get_num_threads()
    prompt = [random.Random(3).randrange(embedded.vocab_size) for _ in range(240)]
    deployment = deployment_of(embedded)
    try:
        for threads in (3, 4):
            torch.set_num_threads(threads)
            results = [
                answer(
                    engines.over(embedded, max_num_batched_tokens=chunk),
                    request(deployment, prompt, max_tokens=4, prompt_logprobs=3),
                )[0]
                for chunk in (512, 128, 107, 95, 32)
            ]
            assert all(result == results[0] for result in results), threads
    finally:
        torch.set_num_threads(before)


def test_earlier_requests_change_nothing(embedded: Checkpoint, engines: EngineFactory) -> None:
    """Earlier requests must leave no base, table or page behind that a later one would read."""
    requests = mixed_requests(embedded, embedded.vocab_size, 6)
    engine = engines.over(embedded, kv_cache_tokens=4096)
    first = answer(engine, requests[0])
    alone(engine, requests[1:])
    assert answer(engine, requests[0]) == first


class Company(Counted):
    """Counts what a request may share with others, besides drafts."""

    num_cached = 0

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Count the tokens of a cached prefix."""
        del request, queue_seconds
        self.num_cached += num_cached_tokens


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.costly)],
    ids=str,
)
def test_a_mixture_of_experts_keeps_its_bits_in_any_company(
    engines: EngineFactory, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Chunks, prefix hits, preemptions and drafts change how many rows an expert gets."""
    model = tiny_model("qwen3_moe", num_experts=16, num_experts_per_tok=4)
    checkpoint = checkpoint_of(in_dtype(model, dtype))
    assert checkpoint.report.bitwise
    deployment = deployment_of(checkpoint)
    rng = random.Random(7)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(32)]
    asked = [
        request(
            deployment,
            [*prefix[: rng.choice([16, 32])], *(rng.randrange(VOCAB_SIZE) for _ in range(length))],
            max_tokens=24,
            logprobs=3,
            temperature=0.8 * (length % 2),
            seed=length,
        )
        for length in (1, 2, 5, 8)
    ]
    expected = [answer(engines.over(checkpoint), each)[0] for each in asked]
    counted = Company()
    config = {"max_num_batched_tokens": 16, "max_num_logit_rows": 16}
    config |= {"kv_cache_tokens": 128, "max_model_len": 128}
    engine = engines.over(checkpoint, observer=counted, **config)
    assert answer(engine, *asked) == expected
    tell(use_adversary(monkeypatch), 3, 0.7, list(zip(asked, expected, strict=True)))
    engine = engines.over(checkpoint, observer=counted, max_draft_tokens=7)
    assert answer(engine, *asked) == expected
    engines.stop_all()  # a step is counted after its last output
    assert min(counted.num_cached, counted.num_preempted, counted.num_accepted) > 0
