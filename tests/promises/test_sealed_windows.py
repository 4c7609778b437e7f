"""A cache in few bits whose layers with a window hold their window: no answer changes by that.

Pages are sealed, and pages that no window sees any more are given back. The answers are those of an
engine whose pages hold all layers: to the bit, in any chunks, company, cache, and with any drafts.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.attention.sealed.cache import SealedCache
from ropewalk.model_runtime.attention.sealed.cpu_backend import SealedCpuAttention
from ropewalk.model_runtime.attention.sealed.page_format import FORMATS
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
from tests.oracles.sealed_mutants import ReadAfterTheStep, ReadAtTheWrite
from tests.oracles.sealed_reference import BITS, SMALL_GROUPS
from tests.sampling import sampled

PAGE, WINDOW = 32, 40
WHOLE = {"kv_cache_tokens": 4096, "max_model_len": 256, "page_size": PAGE}
YARN = {"rope_type": "yarn", "factor": 4.0}
SINKS = {"rope_type": "default", "positions": {"method": "sinks", "sinks": 4, "window": 60}}
NAMES = ("gemma3_text", "mistral", "gemma2", "gpt_oss", "cohere2", "exaone4", "olmo3")


@cache
def windowed(name: str) -> Checkpoint:
    """A taken-over tiny model with windows that span two or three pages."""
    return tiny_checkpoint(name, sliding_window=WINDOW)


def alone(engines: EngineFactory, name: str, kind: str, asked: list[Request]) -> list[Result]:
    """Each request by itself over pages of all layers, in whole chunks and without drafts."""
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 1}
    engine = engines.over(windowed(name), **WHOLE, **limits, kv_cache_dtype=kind)
    return [answer(engine, each)[0] for each in asked]


def held(engines: EngineFactory, name: str, kind: str, **config: Any) -> Engine:
    """An engine whose pages hold groups of layers, in few bits."""
    config = {**WHOLE, "kv_cache_dtype": kind, **config}
    return engines.over(windowed(name), page_groups=groups_of(windowed(name)), **config)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of tiny models have two groups where large ones have more."""
    for kind, group in SMALL_GROUPS.items():
        monkeypatch.setitem(FORMATS, kind, replace(FORMATS[kind], group=group))


@dataclass(frozen=True)
class Case:
    """One way to serve some requests."""

    seed: int
    name: str
    kind: str
    policy: str
    has_sinks: bool
    chunk: int
    num_pages: int  # of the positions; few: sequences are preempted
    most_drafted: int
    share_right: float


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sampled(NAMES, fixed=2, drawn=1)),
    kind=st.sampled_from(sorted(BITS)),
    policy=st.sampled_from(POLICIES),
    has_sinks=st.booleans(),
    chunk=st.sampled_from([4, 7, 33, 64, 300]),
    num_pages=st.sampled_from([18, 128]),
    most_drafted=st.sampled_from([0, 4, 15]),
    share_right=st.sampled_from([0.0, 0.5, 0.9]),
)


@pytest.mark.costly
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_no_way_of_serving_changes_an_answer(
    case: Case, engines: EngineFactory, adversary: type[Adversary]
) -> None:
    """Chunks, company, preemption, prefix hits and drafts, under every policy."""
    rng = random.Random(case.seed)
    has_sinks = case.has_sinks and case.name == "mistral"
    policy = {} if has_sinks else {"rope_policy": case.policy}
    scaling = SINKS if has_sinks else YARN
    deployment = deployment_of(windowed(case.name), rope_scaling=scaling, **policy)
    asked = requests_with_beginnings(rng, deployment, [0, 64, 100])
    expected = alone(engines, case.name, case.kind, asked)
    tell(adversary, case.seed, case.share_right, list(zip(asked, expected, strict=True)))
    engine = held(
        engines,
        case.name,
        case.kind,
        observer=Counted(),
        kv_cache_tokens=case.num_pages * PAGE,
        max_num_batched_tokens=max(case.chunk, case.most_drafted + 1),
        max_num_seqs=min(3, case.chunk),
        max_draft_tokens=case.most_drafted,
    )
    assert answer(engine, *asked) == expected
    assert answer(engine, *reversed(asked)) == expected[::-1]


@pytest.mark.sampled(fixed=1, drawn=2, by="kind")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits_are_made_and_change_nothing(
    engines: EngineFactory, name: str, kind: str
) -> None:
    """A hit needs the last pages of a group with a window, and all pages of the others."""
    deployment = deployment_of(windowed(name), rope_scaling=YARN, rope_policy="fixed")
    prompt = [(at * 7) % VOCAB_SIZE for at in range(200)]
    asked = [request(deployment, prompt[:num], max_tokens=20, logprobs=2) for num in (200, 70, 170)]
    expected = alone(engines, name, kind, asked)
    engine = held(engines, name, kind, max_num_batched_tokens=40, max_num_seqs=1)
    outputs = [list(engine.generate([each])[0]) for each in (asked[0], *asked)]
    assert [Result.of(each) for each in outputs] == [expected[0], *expected]
    cached = [max(output.num_cached_tokens or 0 for output in each) for each in outputs]
    assert cached == [0, 192, 64, 160]


@pytest.mark.parametrize("backend", [ReadAfterTheStep, ReadAtTheWrite])
def test_other_times_to_seal_would_change_answers(
    engines: EngineFactory, backend: type[SealedCpuAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would see both mistakes, in layers with a window, too."""
    monkeypatch.setattr(SealedCache, "own_backend", lambda _: backend)
    deployment = deployment_of(windowed("mistral"), rope_scaling=YARN, rope_policy="fixed")
    assert None not in groups_of(windowed("mistral")).windows
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(200)]
    asked = request(deployment, prompt, max_tokens=20, logprobs=3)
    answers = [
        answer(held(engines, "mistral", "int4", max_num_batched_tokens=chunk), asked)
        for chunk in (300, 7)
    ]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("kind", BITS)
def test_pages_of_windows_take_the_bytes_of_their_groups(engines: EngineFactory, kind: str) -> None:
    """Layers of all groups share sealed pages, and each has open pages of its own."""
    checkpoint = windowed("gemma3_text")
    groups = groups_of(checkpoint)
    limits = {**WHOLE, "max_num_seqs": 3, "kv_cache_tokens": 256}
    grouped = held(engines, "gemma3_text", kind, **limits)._core._runner.store
    whole = engines.over(checkpoint, **limits, kv_cache_dtype=kind)._core._runner.store
    assert groups.num_groups == len(checkpoint.plans) == 4  # of which three have windows
    assert grouped.num_pages == 4 * whole.num_pages
    assert grouped.num_bytes == whole.num_bytes
