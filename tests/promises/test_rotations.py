"""Unusual rotations, end to end: an engine's logprobs are those of transformers."""

from typing import Any

import pytest
import torch

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.rope import Yarn
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.promises.test_static_parity import reference_logprobs

# Layers 4 and 5 read the keys and values of layers 2 and 3.
SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("gemma4_text", SHARED),
        ("ministral3", {}),  # its temperature rises at 16, 32 and 48
        ("deepseek_v2", {}),
        ("minicpm3", {}),
        ("stablelm", {}),
    ],
)
def test_chunks_and_decode_steps_answer_as_untouched(
    engines: EngineFactory, architecture: str, change: dict[str, Any]
) -> None:
    """The prompt runs in chunks of 16 tokens, and the answer ends at the native length."""
    untouched = tiny_model(architecture, **change)
    checkpoint = checkpoint_of(tiny_model(architecture, **change))
    engine = engines.over(checkpoint, max_model_len=64, max_num_batched_tokens=16)
    deployment = deployment_of(checkpoint)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(checkpoint.vocab_size, (52,), generator=generator).tolist()
    asked = request(deployment, prompt, max_tokens=12, prompt_logprobs=0, logprobs=0)
    result = answer(engine, asked)[0]
    expected = reference_logprobs(untouched, [*prompt, *result.token_ids])
    found = [*result.prompt_logprob_values(), *(each.logprob for each in result.logprobs)]
    assert len(result.token_ids) == 12
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_proportional_table_is_scaled_on_its_rotating_pairs(engines: EngineFactory) -> None:
    """At four times L, Gemma 4's full layers have YaRN's table, and the others their own."""
    untouched = tiny_model("gemma4_text")
    checkpoint = checkpoint_of(tiny_model("gemma4_text"))
    engine = engines.over(checkpoint, max_model_len=256)
    yarn_4 = {"rope_type": "yarn", "factor": 4.0}
    deployment = deployment_of(checkpoint, rope_scaling=yarn_4, rope_policy="grow")
    generator = torch.Generator().manual_seed(6)
    prompt = torch.randint(checkpoint.vocab_size, (256,), generator=generator).tolist()
    assert deployment.choose(RopeRequest(), len(prompt), 0).tier.factor == 4.0
    result = answer(engine, request(deployment, prompt, max_tokens=0, prompt_logprobs=0))[0]

    unscaled = reference_logprobs(untouched, prompt)
    yarn = Yarn(factor=4.0, original_max_position_embeddings=64)
    table = yarn.frequencies(checkpoint.native.rotary)
    rotary: Any = untouched.get_submodule("model.rotary_emb")
    native_P = rotary.full_attention_inv_freq.clone()
    rotary.full_attention_inv_freq.copy_(table.inv_freq_P)
    rotary.full_attention_attention_scaling = table.attention_factor
    expected = reference_logprobs(untouched, prompt)
    assert result.prompt_logprob_values() == pytest.approx(expected, abs=1e-3)
    worst = max(abs(one - other) for one, other in zip(unscaled, expected, strict=True))
    assert worst > 0.05, "the reference is not scaled, so this test shows nothing"
    changed_P = table.inv_freq_P != native_P
    assert bool(changed_P[:4].any())
    assert not bool(changed_P[4:].any())
