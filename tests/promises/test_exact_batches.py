"""Promise 2 on a GPU with exact_batches: kernels are interpreted, and no bit may differ."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.batch import Span, single_rows
from ropewalk.model_runtime.config import DEFAULT_DRAFT_TOKENS, EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner, draft_tokens
from ropewalk.model_runtime.gpu.exact.attention import ExactAttention
from ropewalk.model_runtime.gpu.launch import is_interpreted
from ropewalk.model_runtime.layers.low_bits import executors, humming
from ropewalk.model_runtime.layers.low_bits.stored import (
    StoredExperts,
    StoredLinear,
    widened_product,
)
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.low_bits.sizes import Weights
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.runner.cuda_graphs import DecodeGraphs
from ropewalk.rope import Linear, Profile, Unscaled
from tests.checkpoints.quantised_cases import case
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Preemptions,
    answer,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.doubles.recorded_runners import Again, capture
from tests.oracles.triton_attention import load_exactly

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="tests/gpu serves compiled kernels")
EAGER: dict[str, Any] = {"enforce_eager": True}
SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=16, num_rope_tables=2)


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, num_layers: int) -> Checkpoint:
    """A tiny model, as a GPU serves it with exact_batches."""
    load_exactly(monkeypatch)
    sizes = {"num_hidden_layers": num_layers, "hidden_size": 32}
    return tiny_checkpoint(name, exact_batches=True, **SMALL, **sizes)


def some_requests(checkpoint: Checkpoint) -> list[Request]:
    """Prompts of several lengths and factors, greedy and sampled, one with scored tokens."""
    draw = random.Random(2)
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    start = [draw.randrange(2, 150) for _ in range(17)]
    return [
        request(
            deployment,
            [*start[:common], *(draw.randrange(2, 150) for _ in range(num))],
            max_tokens=4,
            temperature=temperature,
            seed=num,
            logprobs=3,
            prompt_logprobs=scored,
        )
        for common, num, temperature, scored in (
            (17, 14, 0.0, None),
            (0, 15, 0.9, 2),
            (17, 60, 0.9, None),
        )
    ]


def test_short_beside_long(monkeypatch: pytest.MonkeyPatch, engines: EngineFactory) -> None:
    """Alone and together, in chunks, from a cached prefix, with drafts, and preempted."""
    checkpoint = loaded(monkeypatch, "llama", 1)
    assert checkpoint.report.bitwise
    asked = EngineConfig(kv_cache_tokens=64, max_model_len=64, max_draft_tokens=None)
    assert draft_tokens(checkpoint, asked) == DEFAULT_DRAFT_TOKENS
    requests = some_requests(checkpoint)
    expected = engines.alone(checkpoint, requests, **EAGER)
    preemptions = Preemptions()
    few = {"kv_cache_tokens": 7 * 16, "max_model_len": 7 * 16, "max_num_batched_tokens": 48}
    engine = engines.over(checkpoint, observer=preemptions, max_draft_tokens=None, **few, **EAGER)
    assert answer(engine, *requests) == expected
    assert preemptions.num
    assert answer(engine, some_requests(checkpoint)[2]) == expected[2:], "cached"


def test_weights_in_few_bits(
    monkeypatch: pytest.MonkeyPatch, engines: EngineFactory, tmp_path: Path
) -> None:
    """The bits of the dequantised model, alone and together, and no library's product."""
    load_exactly(monkeypatch)
    monkeypatch.setattr(executors, "DEVICE_TYPE", "cpu")
    for name in ("is_there", "could_serve"):
        monkeypatch.setattr(humming, name, lambda *_: True)
    monkeypatch.setattr(humming, "product", lambda codes, _: partial(widened_product, codes))
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 64}
    model = tiny_model("qwen3_moe", **SMALL, **sizes, vocab_size=256)
    folder = case("fp8-experts").write(tmp_path / "quantised", model).folder

    def load(weights: Weights) -> Checkpoint:
        how: dict[str, Any] = {"weights": weights, "exact_batches": True}
        return load_checkpoint(folder, dtype="float32", device="cpu", **how)

    stored = load("stored")
    # Other tests see it for floats.
    monkeypatch.setattr("ropewalk.model_runtime.loading.checkpoint.has_same_bits", lambda _: True)
    dequantised = load("dequantised")
    assert stored.report.bitwise
    assert stored.products.endswith("alone, few bits widened for each product (slow)")
    held = [each for each in stored.model.modules() if isinstance(each, StoredLinear)]
    assert held
    assert all(each.codes is not None for each in held)
    assert any(isinstance(each, StoredExperts) for each in stored.model.modules())
    requests = some_requests(stored)[:2]
    expected = engines.alone(dequantised, requests, **EAGER)
    assert engines.alone(stored, requests, **EAGER) == expected
    assert answer(engines.over(stored, **EAGER), *requests) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_captured_and_queued_steps_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A prompt in one piece, as rows of a captured step beside others, and its last token alone."""
    checkpoint = loaded(monkeypatch, name, 2)
    assert checkpoint.report.bitwise
    profiles = Profile(Unscaled()), Profile(Linear(factor=2.0))
    larger = replace(CONFIG, kv_cache_tokens=CONFIG.kv_cache_tokens + CONFIG.page_size)
    runner = build_runner(checkpoint, larger, profiles)
    assert runner._backend is ExactAttention
    draw = random.Random(3)
    spans = []
    for at, num in enumerate((70, 1, 20)):
        tokens = [draw.randrange(2, 150) for _ in range(num)]
        pages = range(at * 8, at * 8 + 8)
        spans.append(Span(tokens, 0, pages, runner.table_id(profiles[at % 2]), range(num)))
    expected_RV = runner.run(spans)
    monkeypatch.setattr(DecodeGraphs, "record_all", lambda _: 0)  # each when it is needed
    capture(runner, Again(), max_rows=96, max_prompt_rows=96)
    assert runner._graphs is not None
    assert torch.equal(runner.run(spans), expected_RV)
    ends = [single_rows([span])[-1] for span in spans]
    last = torch.tensor([69, 70, 90])
    assert torch.equal(runner.run(ends[::-1]), expected_RV[last].flip(0))
