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
from tests.doubles.engines import (
    EngineFactory,
    answer,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.doubles.runner_spy import RunnerSpy

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


@pytest.mark.parametrize("architecture", ["embedded", "llama", "gemma3_text"])
def test_short_beside_long(embedded: Checkpoint, engines: EngineFactory, architecture: str) -> None:
    """Nine methods, factors and lengths share one batch; Gemma has two tables for each."""
    checkpoint = embedded if architecture == "embedded" else tiny_checkpoint(architecture)
    config = {"kv_cache_tokens": 16_384}
    requests = mixed_requests(checkpoint, checkpoint.vocab_size, 5)
    expected = engines.alone(checkpoint, requests, **config)
    for chunk in (16, 512):
        rows = {"max_num_logit_rows": max(16, chunk // 3), "max_num_seqs": 16}
        engine = engines.over(checkpoint, max_num_batched_tokens=chunk, **rows, **config)
        watched = SharedForwards(engine)
        assert answer(engine, *requests) == expected, chunk
    # Nine requests of 84 tokens in all: alone they would take 84 calls or more.
    assert max(watched.num_sequences_per_call) >= 8
    assert max(watched.profiles_per_call) >= 7
    assert sum(each > 4 for each in watched.profiles_per_call) >= 4


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
