"""Every text decoder of transformers with rotation is on a list; unusual ones answer right."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.model_runtime.loading.self_check import PagedPrompts, check
from ropewalk.model_runtime.probing.untouched import original_logits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import checkpoint_of, tiny_checkpoint
from tests.models_page import NOT_TRIED, REFUSED, SERVED, WITH_TOWERS


def has_rotation(architecture: str) -> bool:
    """Whether a text decoder's config speaks of rotation at all."""
    try:
        config = AutoConfig.for_model(architecture).get_text_config(decoder=True)
    except StrictDataclassClassValidationError:  # its defaults do not fit each other
        return True
    values = config.to_dict()
    names = [name for name, value in values.items() if value is not None]
    return any("rope" in name or "rotary" in name for name in names)


def test_every_decoder_with_rotation_is_on_a_list() -> None:
    """A new version of transformers adds names, and each is then tried or has a reason."""
    listed = [*SERVED, *REFUSED, *NOT_TRIED]
    assert len(listed) == len(set(listed))
    rotating = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if has_rotation(name)}
    assert rotating - set(listed) == set()
    # GPT-2 shows the refusal of a model without rotation.
    assert set(listed) - rotating <= {"gpt2", *WITH_TOWERS}


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_shared_layers": 2, "num_hidden_layers": 6},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        {"use_double_wide_mlp": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_variants_of_gemma_4_answer_as_untouched(change: dict[str, Any]) -> None:
    """The published sizes share keys and values among layers, or have experts."""
    types = ["sliding_attention", "full_attention"] * (change.get("num_hidden_layers", 4) // 2)
    change = {**change, "layer_types": types}
    if "enable_moe_block" in change:
        change["moe_intermediate_size"] = 32
    checkpoint = tiny_checkpoint("gemma4_text", **change)
    assert checkpoint.report.difference <= checkpoint.report.threshold
    outline = ModelConfig("x", checkpoint.model.config, torch.float32, torch.device("cpu"))
    found = {index: (each.num_key_heads, each.key_dim) for index, each in outline.layers().items()}
    plans = checkpoint.plans.items()
    assert found == {index: (each.num_key_heads, each.key_dim) for index, each in plans}
    assert len({each.key_dim for _, each in plans}) == 2, "heads differ by layer type"


def test_a_temperature_by_position_is_seen_by_the_self_check() -> None:
    """Ministral 3 raises its queries at every multiple of L, which is 16 here of 48 tokens."""
    model = tiny_model("ministral3")
    native = read_native_rope(model)
    original = original_logits(model, native)
    block = {**model.config.rope_parameters, "llama_4_scaling_beta": 0.0}
    cold = original_logits(tiny_model("ministral3", rope_parameters=block), native)
    apart_T = (original.long_TV - cold.long_TV).abs().amax(-1)
    assert float(apart_T[:16].max()) <= original.threshold
    assert float(apart_T[16:].min()) > 10 * original.threshold
    prompts = PagedPrompts(model, patch_model(model, native), native, original.ids)
    assert check(prompts, original).difference <= original.threshold


def test_a_step_without_its_true_positions_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotation takes positions from the pages, and the temperature from the forward's argument."""
    model = tiny_model("ministral3")
    native = read_native_rope(model)
    original = original_logits(model, native)
    prompts = PagedPrompts(model, patch_model(model, native), native, original.ids)
    forward = ModelRunner._forward

    def counted_from_zero(self: ModelRunner, batch: Any, step: Any, rows_R: Any) -> Any:
        batch.position_ids_1T.sub_(batch.position_ids_1T[0, 0].item())
        return forward(self, batch, step, rows_R)

    monkeypatch.setattr(ModelRunner, "_forward", counted_from_zero)
    with pytest.raises(ModelError, match="fails its self-check on a second chunk"):
        check(prompts, original)


def test_a_temperature_that_a_model_ignores_is_refused() -> None:
    """Llama has no such temperature in transformers, whatever its config says."""
    block = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1,
    }
    model = tiny_model("llama", rope_parameters=block)
    with pytest.raises(
        ModelError, match=r"llama_4_scaling_beta: is 0\.1, but queries are the same"
    ):
        checkpoint_of(model)


def test_sections_of_positions_are_served_for_text() -> None:
    """A text decoder with the block of Qwen 3.5 rotates as without it."""
    block = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    checkpoint = tiny_checkpoint("qwen3", rope_parameters=block)
    assert checkpoint.native == tiny_checkpoint("qwen3").native
    assert checkpoint.report.bitwise


def test_latent_attention_rotates_the_end_of_a_head() -> None:
    """DeepSeek-V2 multiplies complex numbers, and V3 exchanges dimensions before it rotates."""
    for architecture, interleaved in (("deepseek_v2", True), ("deepseek_v3", False)):
        plans = tiny_checkpoint(architecture).plans.values()
        assert {
            (each.rotary_start, each.rotary_dim, each.key_dim, each.value_dim) for each in plans
        } == {(16, 8, 24, 16)}
        assert {each.interleaved for each in plans} == {interleaved}


def test_a_carried_step_is_forgotten_after_its_forward() -> None:
    """StableLM's layers do not pass the step on; other models have no hooks."""
    checkpoint = tiny_checkpoint("stablelm")
    with pytest.raises(ModelError, match="StableLmAttention does not pass keyword arguments"):
        checkpoint.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    others = tiny_checkpoint("llama").model
    assert not any(each._forward_pre_hooks for each in others.modules())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_topk", 2048),
        ("index_topk_blocks", 16),
        ("indexer_budget", 4096),
        ("attention_chunk_size", 8192),
        ("attn_temperature_tuning", True),
    ],
)
def test_attention_that_the_self_check_cannot_see_is_refused_by_its_field(
    field: str, value: int
) -> None:
    """It differs from plain attention after thousands of tokens; the check has 48."""
    model = tiny_model("llama", **{field: value})
    with pytest.raises(ModelError, match=f"LlamaForCausalLM: {field}: is {value}, so"):
        read_native_rope(model)
    model.config.architectures = ["LlamaForCausalLM"]
    outline = ModelConfig("x", model.config, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match=f"LlamaForCausalLM: {field}: is {value}, so"):
        outline.native()
    setattr(model.config, field, None)
    assert not replace(outline).native().carries_scaling
