"""Layers with a window hold their window (page_groups.py), and no answer changes by that.

The answers of an engine whose pages hold groups of layers are those of one whose pages hold all
layers: to the bit, in any chunks, company, cache, and with any drafts.
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from ropewalk.rope import POLICIES
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import (
    EngineFactory,
    Result,
    answer,
    deployment_of,
    groups_of,
    request,
    tiny_checkpoint,
)
from tests.doubles.random_workloads import requests_with_beginnings
from tests.oracles.draft_adversary import Adversary, Counted, tell
from tests.sampling import sampled

PAGE = 8
WHOLE = {"kv_cache_tokens": 4096, "max_model_len": 256, "page_size": PAGE}
YARN = {"rope_type": "yarn", "factor": 4.0}
SINKS = {"rope_type": "default", "positions": {"method": "sinks", "sinks": 4, "window": 40}}
# All have windows of 24 keys, in some layers or in all.
NAMES = (
    *("gemma3_text", "mistral", "gemma2", "cohere2", "exaone4", "olmo3", "gpt_oss", "phi3"),
    "starcoder2",
)
# Layers that read all keys, and rotate as the others do: `sinks` is for such models.
QWEN = {
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 3,
    "num_hidden_layers": 4,
}


@cache
def windowed(name: str) -> Checkpoint:
    """A taken-over tiny model with windows of 24 keys."""
    more = QWEN if name == "qwen2" else {}
    more = {"sliding_window": 24} if name == "phi3" else more
    return tiny_checkpoint(name, **more)


@dataclass(frozen=True)
class Case:
    """One way to serve some requests."""

    seed: int
    name: str
    policy: str
    has_sinks: bool
    chunk: int
    num_pages: int  # of the positions; few: sequences are preempted
    most_drafted: int
    share_right: float


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    name=st.sampled_from([*sampled(NAMES, fixed=2, drawn=1), "qwen2"]),
    policy=st.sampled_from(POLICIES),
    has_sinks=st.booleans(),
    chunk=st.sampled_from([4, 7, 16, 33, 300]),
    num_pages=st.sampled_from([34, 512]),
    most_drafted=st.sampled_from([0, 4, 15]),
    share_right=st.sampled_from([0.0, 0.5, 0.9]),
)


def alone(engines: EngineFactory, name: str, asked: list[Request]) -> list[Result]:
    """Each request by itself over pages of all layers, in whole chunks and without drafts."""
    engine = engines.over(windowed(name), **WHOLE, max_num_batched_tokens=512, max_num_seqs=1)
    return [answer(engine, each)[0] for each in asked]


def grouped(engines: EngineFactory, name: str, **config: Any) -> Engine:
    """An engine whose pages hold groups of layers."""
    groups = groups_of(windowed(name))
    return engines.over(windowed(name), page_groups=groups, **{**WHOLE, **config})


@pytest.mark.costly
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_no_way_of_serving_changes_an_answer(
    case: Case, engines: EngineFactory, adversary: type[Adversary]
) -> None:
    """Chunks, company, preemption, prefix hits and drafts, under every policy."""
    rng = random.Random(case.seed)
    has_sinks = case.has_sinks and case.name in {"qwen2", "mistral", "phi3", "starcoder2"}
    policy = {} if has_sinks else {"rope_policy": case.policy}
    scaling = SINKS if has_sinks else YARN
    deployment = deployment_of(windowed(case.name), rope_scaling=scaling, **policy)
    asked = requests_with_beginnings(rng, deployment, [0, 40, 70])
    expected = alone(engines, case.name, asked)
    tell(adversary, case.seed, case.share_right, list(zip(asked, expected, strict=True)))
    engine = grouped(
        engines,
        case.name,
        observer=Counted(),
        kv_cache_tokens=case.num_pages * PAGE,
        max_num_batched_tokens=max(case.chunk, case.most_drafted + 1),
        max_num_seqs=min(3, case.chunk),
        max_draft_tokens=case.most_drafted,
    )
    assert answer(engine, *asked) == expected
    assert answer(engine, *reversed(asked)) == expected[::-1]


@pytest.mark.sampled(fixed=1, drawn=2)
@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits_are_made_and_change_nothing(engines: EngineFactory, name: str) -> None:
    """A hit needs the last pages of a group with a window, and all pages of the others."""
    deployment = deployment_of(windowed(name), rope_scaling=YARN, rope_policy="fixed")
    prompt = [(at * 7) % VOCAB_SIZE for at in range(161)]
    asked = [request(deployment, prompt[:num], max_tokens=20, logprobs=2) for num in (161, 49, 129)]
    expected = alone(engines, name, asked)
    engine = grouped(engines, name, max_num_batched_tokens=16, max_num_seqs=1)
    outputs = [list(engine.generate([each])[0]) for each in (asked[0], *asked)]
    assert [Result.of(each) for each in outputs] == [expected[0], *expected]
    cached = [max(output.num_cached_tokens or 0 for output in each) for each in outputs]
    assert cached == [0, 160, 48, 128]
