"""The plan, the dry run and `inspect` of models whose layers read a window."""

import pytest
import torch

from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.rope import NativeRope, native_rope
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.planning.banner_lines import describe
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.serving_plan import ServingPlan, plan_serving
from ropewalk.studies.inspection.costs import cost_lines, costs_of
from tests.checkpoints.tiny_models import tiny_config
from tests.doubles.engines import tiny_checkpoint
from tests.doubles.planned import model_facts

MEMORY = 64 * 2**20
GEMMA = {index: None if index % 6 == 5 else 512 for index in range(18)}
TOKEN_BYTES = 18 * 512 * 4
PLAIN = '{"rope_type": "default"}'
SINKS = '{"rope_type": "default", "positions": {"method": "sinks", "sinks": 4, "window": 1020}}'


def native(length: int = 32768) -> NativeRope:
    """A native table of one kind, for so many tokens."""
    return native_rope({"max_position_embeddings": length, "head_dim": 256})


def plan_of(
    windows: dict[int, int | None],
    token_bytes: int = TOKEN_BYTES,
    length: int = 32768,
    **settings: str,
) -> ServingPlan:
    """The plan of a model with these windows."""
    found = load_settings({"rope_scaling": PLAIN, **settings})
    facts = model_facts(found, native(length), token_bytes, MEMORY, windows=windows)
    return plan_serving(found, facts)


def test_a_long_context_fits_a_fifth_of_the_memory() -> None:
    """The longest context follows from the pages that each group holds, and the banner tells it."""
    plan = plan_of(GEMMA, kv_cache_gib="0.25", max_num_batched_tokens="512")
    (deployment,) = plan.deployments
    assert plan.config.num_groups == 6
    assert plan.capacity == 2**28 // TOKEN_BYTES // 64 * 64
    assert deployment.max_len == plan.config.max_model_len == 32768
    assert plan.cache_bytes == plan.config.num_pages * plan.layout.page_bytes
    lines = describe(plan)
    assert (
        "    windows        of 18 layers 15 keep 512 tokens; 36864 bytes a token, 6144 beyond the "
        "windows; a context of 32768 tokens takes 226 MiB at most"
    ) in lines
    whole = plan_of(dict.fromkeys(GEMMA), kv_cache_gib="0.25")
    assert not whole.layout.groups.has_windows
    assert whole.deployments[0].max_len == whole.capacity < 8192
    assert not any("windows" in line for line in describe(whole))


def test_a_cache_without_a_size_holds_every_sequence() -> None:
    """It is no larger than max_num_seqs sequences take."""
    plan = plan_of({0: 64}, 4096, max_num_seqs="2", max_model_len="8192")
    assert plan.config.num_pages == 2 * plan.config.num_held_pages(8192) < 2 * 8192 // 64


def test_the_banner_says_why_windows_are_not_held() -> None:
    """Layers with a window then keep all tokens, as those without."""
    plan = plan_of({index: 512 if index else None for index in range(62)}, 4096)
    assert not plan.layout.groups.has_windows
    reason = "groups of layers alike would be 62, and at most 16 are served"
    assert f"    windows        no sliding-window cache: {reason}" in describe(plan)


def test_sinks_beside_windows_need_room_for_both() -> None:
    """Any length is served if the cache holds the kept tokens and all windows, and else none."""
    mixed = {index: 512 if index < 7 else None for index in range(28)}
    settings = {"rope_scaling": SINKS, "max_model_len": "30000", "max_num_batched_tokens": "512"}
    # 4 + 1,024 kept tokens, 512 of a step and four pages in 3 groups, 18 pages in the fourth.
    needed = 3 * -(-(1028 + 512 + 4 * 64) // 64) + 18
    size = -(-needed // 4) * 64
    plan = plan_of(mixed, 28 * 2048, 1024, kv_cache_tokens=str(size), **settings)
    assert plan.deployments[0].max_len == 30000
    with pytest.raises(SettingsError, match="beside 18 pages of the layers with a window"):
        plan_of(mixed, 28 * 2048, 1024, kv_cache_tokens=str(size - 64), **settings)


def test_a_config_tells_the_windows_that_its_defaults_leave_out() -> None:
    """`test_patch_model` compares those of every architecture."""
    fields = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 24}
    config = tiny_config("qwen2", **fields)
    outline = ModelConfig("there", config, torch.float32, torch.device("cpu"), has_weights=False)
    loaded = tiny_checkpoint("qwen2", **fields).windows
    assert outline.windows() == loaded
    assert any(loaded.values())


def test_inspect_tells_the_bytes_beyond_the_windows() -> None:
    """The longest context takes less than its tokens in all layers."""
    config = tiny_config("gemma3_text", max_position_embeddings=4096)
    outline = ModelConfig("there", config, torch.float32, torch.device("cpu"), has_weights=False)
    layout = outline.cache_layout(16, "auto")
    held = layout.with_windows(outline.windows(), 4096)
    costs = costs_of(outline, held, 4096, None, max_chunk=64)
    assert costs.kv_windows == "of 4 layers 3 keep 24 tokens"
    assert costs.kv_bytes_beyond_windows == costs.kv_bytes_per_token // 4
    page_bytes = 16 * costs.kv_bytes_per_token // 4
    assert costs.longest_context_bytes == (4096 // 16 + 3 * (-(-(24 + 64) // 16) + 2)) * page_bytes
    assert "1.09 MiB of cache for one sequence" in "\n".join(cost_lines(costs, "cpu"))
    whole = costs_of(outline, layout, 4096, None, max_chunk=64)
    assert whole.kv_windows is None
    assert whole.longest_context_bytes == 4096 * whole.kv_bytes_per_token


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_resident_tensors_are_what_the_plan_counts(name: str) -> None:
    """Pages of groups, and tail pages, to the byte."""
    checkpoint = tiny_checkpoint(name, sliding_window=24)
    given = {"kv_cache_gib": "0.01", "max_num_seqs": "3", "max_num_batched_tokens": "64"}
    for kind in ("auto", "bfloat16", "int8", "int4"):
        settings = load_settings({"rope_scaling": PLAIN, "kv_cache_dtype": kind, **given})
        plan = plan_serving(settings, facts_of(checkpoint, settings))
        assert plan.layout.groups.has_windows
        store = build_runner(checkpoint, plan.config).store
        assert store.num_bytes == plan.cache_bytes - plan.cache_parts.get("stage", 0), kind
        assert store.num_bytes <= 0.01 * 2**30
