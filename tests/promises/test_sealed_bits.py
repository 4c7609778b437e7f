"""A cache in other numbers keeps promise 2: no answer depends on chunks, company or the cache.

A query reads earlier pages sealed and its own page exact. Nothing else decides. So tokens, logprobs
and the bytes of pages are equal to the bit, however a sequence was computed.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.sealed.cpu_backend import SealedCpuAttention
from ropewalk.model_runtime.attention.sealed.page_format import FORMATS
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from ropewalk.rope import POLICIES
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
from tests.oracles.draft_adversary import Adversary, Counted, tell
from tests.oracles.sealed_reference import BITS, SMALL_GROUPS, ReferenceModel

KINDS = [*BITS, "bfloat16"]  # the last one rounds when it writes, and seals nothing
PAGE = 32
WHOLE = {"kv_cache_tokens": 4096, "max_model_len": 256, "page_size": PAGE}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of tiny models have two groups where large ones have more."""
    for kind, group in SMALL_GROUPS.items():
        monkeypatch.setitem(FORMATS, kind, replace(FORMATS[kind], group=group))


@dataclass(frozen=True)
class Case:
    """One way to serve some requests."""

    seed: int
    kind: str
    policy: str
    positions: str | None
    chunk: int
    num_pages: int  # few: sequences are preempted
    most_drafted: int
    share_right: float


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(sorted(KINDS)),
    policy=st.sampled_from(POLICIES),
    positions=st.sampled_from([None, None, "rerope", "sinks"]),
    chunk=st.sampled_from([4, 7, 33, 64, 300]),
    num_pages=st.sampled_from([11, 128]),
    most_drafted=st.sampled_from([0, 4, 15]),
    share_right=st.sampled_from([0.0, 0.5, 0.9]),
)
_POSITIONS: dict[str | None, dict[str, Any]] = {
    None: {"rope_type": "yarn", "factor": 4.0},
    "rerope": {"rope_type": "default", "positions": {"method": "rerope", "window": 40}},
    "sinks": {"rope_type": "default", "positions": {"method": "sinks", "sinks": 4, "window": 60}},
}


def records(engine: Engine) -> dict[bytes, bytes]:
    """The bytes of every published page, by its key."""
    engine.stop()
    memory = engine._core._runner.store.page_memory()
    index = engine._core.scheduler.pages.index
    return {
        key: b"".join(tensor[page].tobytes() for tensor in memory)
        for key, page in index.published().items()
    }


def alone(
    engines: EngineFactory, checkpoint: Checkpoint, asked: list[Request], kind: str
) -> tuple[list[Result], dict[bytes, bytes]]:
    """Each request by itself, in whole chunks and without drafts."""
    results, pages = [], {}
    for each in asked:
        engine = engines.over(
            checkpoint, **WHOLE, kv_cache_dtype=kind, max_num_batched_tokens=512, max_num_seqs=1
        )
        results += answer(engine, each)
        pages |= records(engine)
    return results, pages


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_no_way_of_serving_changes_an_answer_or_a_page(
    case: Case,
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    adversary: type[Adversary],
) -> None:
    """Chunks, company, preemption, prefix hits and drafts, under every policy."""
    rng = random.Random(case.seed)
    policy = {} if case.positions else {"rope_policy": case.policy}
    deployment = deployment_of(llama_checkpoint, rope_scaling=_POSITIONS[case.positions], **policy)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(70)]
    asked = []
    for _ in range(4):
        prompt = shared[: rng.choice([0, 40, 70])]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([3, 31, 60, 90]))]
        sampling = rng.choice([{}, {"logprobs": 3}, {"temperature": 0.9, "seed": 7}])
        asked.append(request(deployment, prompt, max_tokens=rng.randint(1, 60), **sampling))
    expected, pages = alone(engines, llama_checkpoint, asked, case.kind)
    tell(adversary, case.seed, case.share_right, list(zip(asked, expected, strict=True)))
    counted = Counted()
    engine = engines.over(
        llama_checkpoint,
        observer=counted,
        kv_cache_tokens=case.num_pages * PAGE,
        max_model_len=256,
        page_size=PAGE,
        kv_cache_dtype=case.kind,
        max_num_batched_tokens=max(case.chunk, case.most_drafted + 1),
        max_num_seqs=min(3, case.chunk),
        max_draft_tokens=case.most_drafted,
    )
    first = answer(engine, *asked)
    again = answer(engine, *reversed(asked))
    assert first == expected
    assert again == expected[::-1]
    found = records(engine)
    assert found
    assert {key: found[key] for key in found.keys() & pages.keys()} == {
        key: pages[key] for key in found.keys() & pages.keys()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hits_are_made_and_change_nothing(
    engines: EngineFactory, llama_checkpoint: Checkpoint, kind: str
) -> None:
    """Every page of a prompt is found again, and its answer stays."""
    deployment = deployment_of(llama_checkpoint, rope_scaling=_POSITIONS[None], rope_policy="fixed")
    asked = [
        request(deployment, [(at * 7) % VOCAB_SIZE for at in range(num)], max_tokens=20, logprobs=2)
        for num in (33, 65, 129, 160)
    ]
    expected, _ = alone(engines, llama_checkpoint, asked, kind)
    engine = engines.over(llama_checkpoint, **WHOLE, kv_cache_dtype=kind)
    answer(engine, asked[-1])
    outputs = [list(each) for each in engine.generate(asked)]
    assert [Result.of(each) for each in outputs] == expected
    cached = [max(output.num_cached_tokens or 0 for output in each) for each in outputs]
    assert cached == [32, 64, 128, 128]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_without_memory_writes_no_open_page_twice(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """Layers up to this one have begun their next open page when the older prompt's step fails."""
    deployment = deployment_of(llama_checkpoint)
    asked = [
        request(deployment, [(at * 7 + num) % VOCAB_SIZE for at in range(num)], **options)
        for num in (150, 60)
        for options in [{"max_tokens": 8, "logprobs": 2}]
    ]
    expected, _ = alone(engines, llama_checkpoint, asked, "int4")
    engine = engines.over(
        llama_checkpoint, **WHOLE, kv_cache_dtype="int4", max_num_batched_tokens=50
    )
    prepare, write = engine._core._runner.prepare, SealedCpuAttention.write_columns
    num_writes: list[int] = []  # of the step that fails

    def prepared(spans: list[Span]) -> Any:
        first = spans[0].first_position % PAGE
        crosses = first and first + len(spans[0].token_ids) > PAGE
        forward = prepare(spans)
        if len(spans) < 2 or not crosses or num_writes:
            return forward

        def run() -> Any:
            num_writes.append(0)
            with monkeypatch.context() as patch:
                patch.setattr(SealedCpuAttention, "write_columns", failing)
                return forward()

        return run

    def failing(*arguments: Any) -> None:
        write(*arguments)
        num_writes[0] += 1
        if num_writes[0] > layer:
            raise MemoryError

    monkeypatch.setattr(engine._core._runner, "prepare", prepared)
    assert answer(engine, *asked) == expected
    assert num_writes == [layer + 1]


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_5", "qwen3_moe"])
def test_other_architectures_keep_their_bits(engines: EngineFactory, name: str, kind: str) -> None:
    """Windows, soft caps, sinks, mixtures, and layers that keep a state."""
    checkpoint = tiny_checkpoint(name)
    deployment = deployment_of(checkpoint)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(num)] for num in (20, 100)]
    asked = [request(deployment, each, max_tokens=24, logprobs=1) for each in prompts]
    expected, _ = alone(engines, checkpoint, asked, kind)
    engine = engines.over(checkpoint, **WHOLE, kv_cache_dtype=kind, max_num_batched_tokens=33)
    assert answer(engine, *asked) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("kind", BITS)
def test_bfloat16_models_keep_their_bits(engines: EngineFactory, kind: str) -> None:
    """Open pages are then bfloat16."""
    checkpoint = checkpoint_of(in_dtype(tiny_model("llama"), torch.bfloat16))
    deployment = deployment_of(checkpoint)
    prompts = [[(at * 5) % VOCAB_SIZE for at in range(num)] for num in (9, 110)]
    asked = [request(deployment, each, max_tokens=30, logprobs=1) for each in prompts]
    expected, _ = alone(engines, checkpoint, asked, kind)
    engine = engines.over(checkpoint, **WHOLE, kv_cache_dtype=kind, max_num_batched_tokens=33)
    assert answer(engine, *asked) == expected


@pytest.mark.sampled(fixed=("llama",), drawn=1)
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_logprobs_equal_transformers_over_sealed_pages(
    engines: EngineFactory, name: str, kind: str
) -> None:
    """The untouched model in float64, whose keys and values numpy seals (sealed_reference.py)."""
    model = tiny_model(name, max_position_embeddings=256)
    rng = random.Random(2)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(130)]
    expected = ReferenceModel(tiny_model(name, max_position_embeddings=256), kind, PAGE).logprobs(
        prompt
    )
    checkpoint = checkpoint_of(model)
    deployment = deployment_of(checkpoint)
    engine = engines.over(checkpoint, **WHOLE, kv_cache_dtype=kind)
    (result,) = answer(engine, request(deployment, prompt, max_tokens=1, prompt_logprobs=1))
    got = result.prompt_logprob_values()
    wanted = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
    # A number half-way between two codes may round to the other one in float32.
    errors = sorted(abs(a - b) for a, b in zip(got, wanted, strict=True))
    assert errors[len(errors) // 2] < 1e-3
    assert errors[-1] < 0.3
