"""Promise 2 over every kind of cache: no way of serving changes an answer or a page.

Chunks, company, preemption, prefix hits and drafts under every policy, in one batch. The reference
is each request alone in a fresh engine: in whole chunks, without drafts, over pages of all layers.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.low_bits.quantise import quantise_model
from ropewalk.model_runtime.page_groups import ONE_GROUP
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.text.grammar import Grammar, GrammarCompiler
from ropewalk.rope import POLICIES
from tests.checkpoints.tiny_models import VOCAB_SIZE, in_dtype, tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Result,
    answer,
    checkpoint_of,
    deployment_of,
    groups_of,
    random_tokens,
    request,
)
from tests.doubles.tokens import byte_tokenizer
from tests.oracles.draft_adversary import Adversary, Company, tell
from tests.oracles.quantised_reference import BITS

pytestmark = pytest.mark.usefixtures("small_groups")

SCHEMA = {"type": "object", "properties": {"a": {"enum": [True, 7]}}, "required": ["a"]}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "seed": 11, "stop": ("a", "e")},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "prompt_logprobs": 2},
)
POSITIONS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "rerope": {"rope_type": "default", "positions": {"method": "rerope", "window": 40}},
    "sinks": {"rope_type": "default", "positions": {"method": "sinks", "sinks": 4, "window": 60}},
}
# Layers with windows of 40 keys: all of them, or some beside layers that read all keys.
WINDOWED = {
    "gemma3_text": ("auto", "int4", "fixed8"), "mistral": ("auto",), "qwen2": ("k8v4",),
    "gemma2": ("int8",), "gpt_oss": ("int4",), "phi3": ("bfloat16",),
}  # fmt: skip
STATES = ("qwen3_5_text", "lfm2", "lfm3")
MORE: dict[str, dict[str, Any]] = {
    **{name: {"sliding_window": 40} for name in WINDOWED},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 3,
        "num_hidden_layers": 4,
    },
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4},
}


@dataclass(frozen=True)
class Case:
    """A model and its cache, and how its requests are served."""

    model: str
    cache: str = "auto"
    positions: str = "yarn"
    weights: str = "float32"
    chunk: int = 300
    most_drafted: int = 0
    share_right: float = 0.8
    is_tight: bool = False  # sequences are preempted
    num_slots: int | None = None  # of states

    def __str__(self) -> str:
        return f"{self.model}-{self.cache}-{self.positions}-{self.weights}"

    @property
    def page(self) -> int:
        """A page of few bits has 32 tokens or more."""
        return 32 if self.cache in BITS else 8


def _cases() -> list[Case]:
    made = [
        *(Case("llama", each) for each in ("auto", *BITS, "bfloat16", "fixed8")),
        *(Case("llama", each, "rerope") for each in ("auto", "int4", "fixed8")),
        *(Case("llama", each, "sinks") for each in ("auto", "int8")),
        *(Case("llama", each, weights="bfloat16") for each in ("auto", "int4", "fixed8")),
        *(Case(name, each) for name, kinds in WINDOWED.items() for each in kinds),
        # `sinks` is for models whose layers all rotate alike.
        *(Case(name, each, "sinks") for name, each in (("qwen2", "auto"), ("mistral", "k8v4"))),
        *(Case(name) for name in ("gpt_neox", "qwen3_moe", *STATES)),
        *(Case("qwen3_5_text", each) for each in ("int4", "bfloat16")),
        *(Case(name, weights="bfloat16") for name in ("qwen3_5_text", "qwen3_moe")),
        *(Case(name, weights="few bits") for name in ("qwen3_5_text", "lfm2")),
    ]
    return [
        replace(
            each,
            chunk=(7, 300, 33, 4, 64)[number % 5],
            most_drafted=(15, 4, 0)[number % 3],
            share_right=(0.5, 0.9, 0.8, 0.0)[number % 4],
            is_tight=number % 2 == 0,
            num_slots=6 if each.model in STATES and number % 2 else None,
        )
        for number, each in enumerate(made)
    ]


@cache
def checkpoint_for(name: str, weights: str = "float32") -> Checkpoint:
    """A taken-over tiny model."""
    model = tiny_model(name, **MORE.get(name, {}))
    if weights == "bfloat16":
        return checkpoint_of(in_dtype(model, torch.bfloat16))
    if weights == "few bits":
        quantise_model(model, byte_tokenizer())
    return checkpoint_of(model)


@cache
def _grammar() -> Grammar:
    compiler = GrammarCompiler(byte_tokenizer())
    return compiler.compile(compiler.text_of(SCHEMA)).result()


def _requests(case: Case, checkpoint: Checkpoint) -> list[Request]:
    """Six requests of all policies, greedy and drawn, of which some begin alike."""
    deployment = deployment_of(checkpoint, rope_scaling=POSITIONS[case.positions])
    made = []
    for number, (num_shared, num_own) in enumerate(
        ((70, 0), (70, 0), (40, 20), (0, 61), (70, 55), (40, 3))
    ):
        prompt = random_tokens(70)[:num_shared] + random_tokens(num_own, number)
        policy = POLICIES[number % len(POLICIES)] if case.positions == "yarn" else None
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        rope = RopeRequest(policy=policy)
        num_new = min((8 if case.is_tight else 3) * (number + 1), 160 - len(prompt))
        made.append(request(deployment, prompt, rope, max_tokens=num_new, **sampling))
    made[-1] = replace(made[-1], grammar=_grammar())
    return made


def _pages(engine: Engine) -> dict[bytes, bytes]:
    """The bytes of every published page, by its key."""
    engine.stop()
    memory = engine._core._runner.store.page_memory()
    index = engine._core.scheduler.pages.index
    return {
        key: b"".join(tensor[page].tobytes() for tensor in memory)
        for key, page in index.published().items()
    }


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_no_way_of_serving_changes_an_answer_or_a_page(
    case: Case, engines: EngineFactory, adversary: type[Adversary]
) -> None:
    """Six requests in two orders, of which the second finds the pages of the first."""
    checkpoint = checkpoint_for(case.model, case.weights)
    assert checkpoint.report.bitwise
    asked = _requests(case, checkpoint)
    cached = {"kv_cache_dtype": case.cache, "page_size": case.page}
    expected, pages = [], dict[bytes, bytes]()
    for each in asked:
        engine = engines.over(checkpoint, max_model_len=160, **cached)
        expected += answer(engine, each)
        pages |= _pages(engine)
    tell(adversary, 3, case.share_right, list(zip(asked, expected, strict=True)))
    adversary.share_silent = 0.2
    groups = groups_of(checkpoint) if case.model in WINDOWED else ONE_GROUP
    counted = Company()
    engine = engines.over(
        checkpoint,
        observer=counted,
        page_groups=groups,
        max_model_len=160,
        kv_cache_tokens=160 if case.is_tight else 4096,
        max_num_batched_tokens=max(case.chunk, case.most_drafted + 1),
        max_num_seqs=min(3, case.chunk),
        max_draft_tokens=case.most_drafted,
        num_state_slots=case.num_slots,
        **cached,
    )
    assert answer(engine, *asked) == expected
    assert answer(engine, *reversed(asked)) == expected[::-1]
    found = _pages(engine)  # stops the engine: a step is counted after its last output
    if not groups.has_windows:
        assert found.keys() & pages.keys()
        assert {key: each for key, each in found.items() if pages.get(key, each) != each} == {}
    assert counted.num_cached > 0
    assert sum(each.num_rescales for each in expected) > 0 or case.positions != "yarn"
    if case.is_tight and not groups.has_windows:  # layers with windows give pages back
        assert counted.num_preempted > 0
    assert counted.num_accepted > 0 or 0 in (case.most_drafted, case.share_right)


@pytest.mark.parametrize(
    ("model", "cache", "cached"),
    [
        ("llama", "int4", [0, 192, 64, 160]),
        ("gemma3_text", "auto", [0, 192, 64, 160]),
        ("mistral", "auto", [0, 192, 64, 160]),
        ("gemma3_text", "int4", [0, 192, 64, 160]),
    ],
)
def test_prefix_hits_are_made_and_change_nothing(
    engines: EngineFactory, model: str, cache: str, cached: list[int]
) -> None:
    """A hit needs the last pages of a group with a window, and all pages of the others."""
    checkpoint = checkpoint_for(model)
    deployment = deployment_of(checkpoint, rope_scaling=POSITIONS["yarn"], rope_policy="fixed")
    prompt = [(at * 7) % VOCAB_SIZE for at in range(200)]
    asked = [request(deployment, prompt[:num], max_tokens=9, logprobs=2) for num in (200, 70, 170)]
    config = {"kv_cache_dtype": cache, "page_size": 32}
    groups = groups_of(checkpoint) if model in WINDOWED else ONE_GROUP
    expected = engines.alone(checkpoint, asked, **config)
    engine = engines.over(
        checkpoint, page_groups=groups, max_num_batched_tokens=40, max_num_seqs=1, **config
    )
    outputs = [list(engine.generate([each])[0]) for each in (asked[0], *asked)]
    assert [Result.of(each) for each in outputs] == [expected[0], *expected]
    assert [max(output.num_cached_tokens or 0 for output in each) for each in outputs] == cached
