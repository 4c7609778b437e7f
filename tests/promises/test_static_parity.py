"""Promises 1 and 3, end to end: the answers are those of transformers under the same table."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request


def blocks(native_len: int, pairs: int) -> dict[str, dict[str, Any]]:
    """One deployment block per method, for factor 4."""
    return {
        "yarn": {"rope_type": "yarn", "factor": 4.0},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "ntk": {"rope_type": "ntk", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "llama3": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "longrope": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * pairs,
            "long_factor": [1.0 + 3 * index / pairs for index in range(pairs)],
            "original_max_position_embeddings": native_len,
        },
    }


def reference_block(block: dict[str, Any], theta: float, width: int, native_len: int) -> Any:
    """The same block in transformers' config, which has ntk only as a larger base."""
    if block["rope_type"] == "ntk":
        return {"rope_type": "default", "rope_theta": theta * 4.0 ** (width / (width - 2))}
    stated = {"original_max_position_embeddings": native_len}
    if block["rope_type"] in ("linear", "dynamic"):
        stated = {}
    return {**block, **stated, "rope_theta": theta}


def reference_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """The logprob of every token after the first, by one plain forward without a cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    following = torch.tensor(token_ids[1:])
    found: list[float] = logits[:-1].log_softmax(-1).gather(1, following[:, None])[:, 0].tolist()
    return found


def with_block(model: PreTrainedModel, block: dict[str, Any], max_len: int) -> PreTrainedModel:
    """The same weights in a fresh model whose config carries the block."""
    config = type(model.config).from_dict(model.config.to_dict())
    share = model.config.rope_parameters.get("partial_rotary_factor")
    config.rope_parameters = {**block, **({"partial_rotary_factor": share} if share else {})}
    config.max_position_embeddings = max_len
    fresh = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


def compare(
    engines: EngineFactory, checkpoint: Checkpoint, untouched: PreTrainedModel, method: str
) -> None:
    """Compare an echoed prompt of exactly 4 L under `grow` with the static reference."""
    native_len = checkpoint.native.native_len
    rotary = checkpoint.native.rotary
    block = blocks(native_len, rotary.num_pairs)[method]
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(checkpoint.vocab_size, (4 * native_len,), generator=generator).tolist()
    engine = engines.over(checkpoint, max_model_len=4 * native_len)
    deployment = deployment_of(checkpoint, rope_scaling=block, rope_policy="grow")
    result = answer(engine, request(deployment, prompt, max_tokens=0, prompt_logprobs=0))[0]

    # transformers' dynamic reads the trained length from max_position_embeddings.
    max_len = native_len if method == "dynamic" else 4 * native_len
    stated = reference_block(block, rotary.rope_theta, rotary.rotary_dim, native_len)
    expected = reference_logprobs(with_block(untouched, stated, max_len), prompt)
    assert result.prompt_logprob_values() == pytest.approx(expected, abs=1e-3)
    assert deployment.choose(RopeRequest(), len(prompt), 0).tier.factor == 4.0
    unscaled = reference_logprobs(untouched, prompt)
    worst = max(abs(one - other) for one, other in zip(unscaled, expected, strict=True))
    assert worst > 0.05, "the reference is not scaled, so this test shows nothing"


METHODS = list(blocks(64, 8))


@cache
def taken_over(architecture: str) -> Checkpoint:
    """A tiny model, which all methods share."""
    return checkpoint_of(tiny_model(architecture))


def test_four_native_lengths_on_the_embedded_model(
    embedded: Checkpoint, engines: EngineFactory
) -> None:
    """A prompt under one table equals transformers under the static table of that factor."""
    untouched = AutoModelForCausalLM.from_pretrained(
        EMBEDDED_MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    compare(engines, embedded, untouched, "yarn")


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        *(("llama", method) for method in METHODS),
        *((architecture, "yarn") for architecture in ("qwen2", "gpt_neox", "cohere")),
    ],
)
def test_four_native_lengths_on_random_models(
    engines: EngineFactory, architecture: str, method: str
) -> None:
    """The architectures add biases and partial or interleaved rotary dimensions."""
    untouched = tiny_model(architecture, attn_implementation="eager")
    compare(engines, taken_over(architecture), untouched, method)


def test_within_the_trained_length_the_answer_is_transformers_generate(
    embedded: Checkpoint, engines: EngineFactory
) -> None:
    """Greedy tokens are equal, and echoed logprobs agree within 1e-4."""
    untouched = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    engine = engines.over(embedded)
    deployment = deployment_of(embedded)
    for text in ("import os\nimport sys\n\ndef ", 'class Reader:\n    """', "for key, value in "):
        prompt = embedded.tokenizer.encode(text)
        result = answer(engine, request(deployment, prompt, max_tokens=40, prompt_logprobs=1))[0]
        generated = untouched.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=1
        )
        assert [*prompt, *result.token_ids] == generated[0].tolist()
        expected = reference_logprobs(untouched, prompt)
        assert result.prompt_logprob_values() == pytest.approx(expected, abs=1e-4)
