"""Models are patched by probing; the self-check refuses those that come out wrong."""

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.loading.config_values import state_shapes, text_values
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.model_runtime.loading.self_check import PagedPrompts, check
from ropewalk.model_runtime.probing.untouched import OriginalLogits, original_logits
from tests.checkpoints.tiny_models import tiny_config, tiny_model
from tests.models_page import REFUSED, SERVED, Outcome, outcome, page


def patched(architecture: str) -> tuple[PagedPrompts, OriginalLogits]:
    """A tiny model, patched and not yet checked, and what it was; the prompts are random tokens."""
    model = tiny_model(architecture)
    native = read_native_rope(model)
    original = original_logits(model, native)
    plans = patch_model(model, native)
    packed_linear.pack(model)
    packed_linear.replace_activations(model)
    return PagedPrompts(model, plans, native, original.ids), original


# These have a key head for every query head, and no field for it.
MULTI_HEAD = {"fuyu", "gpt_neox", "modernbert-decoder", "persimmon"}
# JetMoE repeats its key heads for each expert, and MiMo V2 has more of them in sliding layers.
UNSTATED = {"jetmoe", "mimo_v2_flash"}
ALL = (*SERVED, *REFUSED)
PAGE = Path(__file__).parents[3] / "docs/reference/models.md"
GPU_COLUMN = 4


@cache
def found_for(architecture: str) -> Outcome:
    """An architecture of docs/reference/models.md, patched or refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(architecture)


@pytest.mark.parametrize("architecture", SERVED)
def test_served_architectures_answer_as_untouched(architecture: str) -> None:
    """Answers agree within rounding, with the same bits alone, in batches and in chunks."""
    found = found_for(architecture)
    assert found.refusal == ""
    assert found.is_bitwise


@pytest.mark.parametrize("architecture", REFUSED)
def test_others_are_refused_by_name(architecture: str) -> None:
    """A model that would be served wrongly is refused by its name."""
    assert found_for(architecture).refusal


@pytest.mark.timeout(900)  # if it runs first, then it loads all of them
def test_the_page_about_models_is_what_was_found() -> None:
    """`python -m tests.models_page > docs/reference/models.md` writes the page anew."""
    assert without_gpu(PAGE.read_text()) == without_gpu(page(list(map(found_for, ALL))))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_says_what_a_gpu_runs() -> None:
    """Kernels are interpreted."""
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    assert PAGE.read_text() == page([outcome(each, on_gpu=True) for each in ALL])


def without_gpu(text: str) -> list[str]:
    """The lines of the page without what only interpreted kernels show."""
    lines = []
    for line in text.splitlines():
        cells = line.split("|")
        if line.startswith("| `") and len(cells) == GPU_COLUMN + 2:
            cells[GPU_COLUMN] = ""
        if "| GPU |" not in line or line.startswith("| architecture"):
            lines.append("|".join(cells))
    return lines


@pytest.mark.parametrize("architecture", sorted({*SERVED} - UNSTATED))
def test_the_config_gives_the_cache_that_probing_finds(architecture: str) -> None:
    """Tables, heads, windows and states of every architecture that is served, but for two."""
    overrides: dict[str, Any] = {"num_key_value_heads": 4} if architecture in MULTI_HEAD else {}
    if architecture == "fuyu":
        overrides = {"text_config": overrides}
    config = tiny_config(architecture, **overrides)
    outline = ModelConfig("x", config, torch.float32, torch.device("cpu"))
    loaded = found_for(architecture).checkpoint
    assert loaded is not None
    assert outline.native() == loaded.native
    assert outline.windows() == loaded.windows
    assert state_shapes(text_values(config)) == loaded.states
    stated, probed = (
        {at: (each.num_key_heads, each.key_dim, each.value_dim) for at, each in layers.items()}
        for layers in (outline.layers(), loaded.plans)
    )
    assert stated == probed


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("gpt2", "no rotary position embeddings"),
        ("phimoe", r"fails its self-check on one prompt: a logit differs by [0-9.]+"),
        ("falcon", "did not call the attention it was given"),
        ("hunyuan_v1_dense", "or changes them after it has rotated them"),
        ("llama4_text", "attention_chunk_size: is 16, so a query sees the keys of its own chunk"),
        ("deepseek_v32", "index_topk: is 16, so an index chooses the keys that a query sees"),
    ],
)
def test_a_refusal_says_the_figure(architecture: str, message: str) -> None:
    """A refusal to which no figure applies names the obstacle."""
    assert re.search(message, found_for(architecture).refusal)


def test_a_state_that_is_not_served_fails_the_self_check() -> None:
    """If nothing else refused it: its second sequence would continue the first one's."""
    prompts, original = patched("falcon_h1")
    with pytest.raises(ModelError, match="fails its self-check on two sequences in one flat batch"):
        check(prompts, original)


def test_soft_caps_and_sinks_are_honoured() -> None:
    """The thresholds are far below the effect of a soft cap or a sink."""
    for architecture in ("gemma2", "gpt_oss"):
        report = check(*patched(architecture))
        assert report.difference <= report.threshold < 1e-2


def test_pairing_width_and_layer_types_are_probed() -> None:
    """Pairs are half-split or interleaved, whole or partial, by layer type, or absent."""

    def plans_of(architecture: str) -> list[LayerPlan]:
        checkpoint = found_for(architecture).checkpoint
        assert checkpoint is not None
        return list(checkpoint.plans.values())

    plans = plans_of("gpt_neox")
    assert {(plan.rotary_dim, plan.key_dim, plan.interleaved) for plan in plans} == {(8, 16, False)}
    assert all(plan.interleaved for plan in plans_of("cohere"))
    types = [plan.layer_type for plan in plans_of("cohere2")]
    assert types == ["all", "all", "all", None]
    types = [plan.layer_type for plan in plans_of("gemma3_text")]
    assert types == [*["sliding_attention"] * 3, "full_attention"]


def test_a_window_that_is_ignored_is_seen() -> None:
    """The self-check shrinks windows below the length of its prompts."""
    model = tiny_model("mistral")
    native = read_native_rope(model)
    original = original_logits(model, native)
    plans = patch_model(model, native)
    import transformers

    from ropewalk.model_runtime.attention.paged_attention import paged_attention

    def forgetful(*arguments: Any, sliding_window: int | None = None, **rest: Any) -> Any:
        return paged_attention(*arguments, **rest)

    transformers.AttentionInterface.register("ropewalk", forgetful)
    try:
        with pytest.raises(ModelError, match="a logit differs"):
            check(PagedPrompts(model, plans, native, original.ids), original)
    finally:
        transformers.AttentionInterface.register("ropewalk", paged_attention)


def test_a_rotary_module_that_differs_from_its_config_is_refused() -> None:
    """The tables of the module and of its config are compared to the bit."""
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * (1 + 1e-6)
    with pytest.raises(ModelError, match="another table than its config says"):
        read_native_rope(model)


def test_a_checkpoint_that_carries_scaling_is_patched_natively() -> None:
    """The checkpoint has a yarn block with its attention factor."""
    block = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = tiny_model("llama", rope_parameters=block)
    native = read_native_rope(model)
    assert native.carries_scaling
    assert native.native_len == 64
    original = original_logits(model, native)
    plans = patch_model(model, native)
    check(PagedPrompts(model, plans, native, original.ids), original)
