"""The banner and `config check` tell who may ask for what."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import draft_tokens
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.parallel.trial import Shape, Where, keeps_bits
from ropewalk.rope import native_rope
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.planning.banner_lines import (
    describe,
    draft_lines,
    limit_lines,
    self_check_line,
    step_line,
)
from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of
from ropewalk.server.startup.planning.serving_plan import plan_layout, plan_serving
from tests.doubles.planned import model_facts

TWO = """[
    {"name": "a", "allowed_rope_types": ["yarn", "linear"], "max_rope_factor": 2},
    {"name": "b", "rope_policy": "fixed", "max_model_len": 500}
]"""


def plan_lines(embedded: Checkpoint, **flags: str) -> list[str]:
    """The banner's lines about the deployments."""
    settings = load_settings({"kv_cache_tokens": "65536", **flags})
    return describe(plan_serving(settings, model_facts(settings, embedded.native, 8192)))


def test_each_deployment_tells_its_own_rules(embedded: Checkpoint) -> None:
    """The longest context, the methods, the factors and the policies have lines."""
    assert plan_lines(embedded)[2:5] == [
        "    scaling        yarn, by_position",
        "    tiers          256:1x 512:2x 1024:4x 2048:8x",
        "    longest        2048 tokens",
    ]
    assert not any("may name" in line for line in plan_lines(embedded))
    lines = "\n".join(plan_lines(embedded, deployments=TWO))
    assert "may name linear, yarn, default (up to 256 tokens); factors up to 2; any policy" in lines
    assert "    longest        500 tokens (max_model_len)" in lines
    small = plan_lines(embedded, kv_cache_tokens="512")
    assert "    longest        512 tokens (the size of the KV cache)" in small


def test_contexts_that_the_cache_cuts_are_told(embedded: Checkpoint) -> None:
    """A tier that begins beyond the longest context stands apart from those that are reached."""
    small = plan_lines(embedded, kv_cache_tokens="512")
    assert "    tiers          256:1x 512:2x; beyond the longest context: 1024:4x 2048:8x" in small
    assert (
        "    warning        the KV cache has 512 tokens, and the longest tier 2048; raise "
        "kv_cache_gib or kv_cache_tokens, or quantise the cache (kv_cache_dtype)"
    ) in small
    for lines in (
        plan_lines(embedded),
        plan_lines(embedded, max_model_len="500"),
    ):
        assert "warning" not in "".join(lines)
    assert "    tiers          256:1x 512:2x; beyond the longest context: 1024:4x 2048:8x" in lines


def test_a_position_method_stands_in_the_place_of_a_factor(embedded: Checkpoint) -> None:
    """It goes with the trained table at every length."""
    lines = plan_lines(
        embedded, rope_scaling='{"positions": {"method": "rerope"}}', max_model_len="1024"
    )
    assert "    tiers          256:1x 1024:rerope" in lines


@pytest.mark.parametrize(
    ("max_len", "flags", "told"),
    [
        (1024, {}, ("fixed", "1024:4x", None)),
        (
            256,
            {},
            (
                "by_position",
                "256:1x 512:2x 1024:4x",
                "yarn was added to the checkpoint, because factor 4 x 256 is more than "
                "max_position_embeddings (256); so the trained length is 256 tokens",
            ),
        ),
        (
            1024,
            {"rope_policy": "pinned"},
            (
                "grow",
                "256:1x 512:2x 1024:4x",
                "the checkpoint was trained with yarn; under rope_policy grow its first 256 tokens "
                "are served without it, which the model may not know",
            ),
        ),
    ],
    ids=["trained", "added", "asked for"],
)
def test_a_block_of_the_checkpoint_that_scales_by_length_is_told(
    max_len: int, flags: dict[str, str], told: tuple[str, str, str | None]
) -> None:
    """The warning says why, because the model may have been trained with the block."""
    policy, tiers, warning = told
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    native = native_rope(
        {"max_position_embeddings": max_len, "head_dim": 64, "rope_scaling": block}
    )
    # Of the embedded model, the server would choose the scaling itself.
    settings = load_settings({"model": "some/model", "kv_cache_tokens": "65536", **flags})
    lines = describe(plan_serving(settings, model_facts(settings, native, 8192)))
    assert f"    scaling        yarn, {policy}" in lines
    assert f"    tiers          {tiers}" in lines
    warnings = [line for line in lines if line.startswith("    warning ")]
    assert warnings == ([] if warning is None else [f"    warning        {warning}"])


def test_changed_limits_and_access_are_told_without_secrets() -> None:
    """A key never appears in a banner, which ends up in logs."""
    assert limit_lines(load_settings({})) == [
        "  access           every client that reaches the port, without a key",
    ]
    settings = load_settings(
        {
            "api_key": "secret-1,secret-2",
            "keys": '[{"name": "alice", "max_running": 1}]',
            "open_metrics": True,
            "access_log": "off",
            "playground": "never",
            "host": "0.0.0.0",  # noqa: S104  # nothing listens
            "allowed_origins": "https://a.example",
            "max_n": "5",
            "max_queued_requests": "3",
            "allowed_chat_template_kwargs": "",
        }
    )
    assert limit_lines(settings) == [
        "  access           clients with a key (/metrics without), bounded: alice; web pages of "
        "https://a.example",
        "  access log       off",
        "  playground       not served",
        "  limits           max_queued_requests 3; max_n 5; allowed_chat_template_kwargs none",
    ]
    assert "secret" not in "".join(limit_lines(settings))


@pytest.mark.parametrize(
    ("is_exact", "line"),
    [
        (True, "up to 7 tokens; no bit of an answer depends on them"),
        (False, "up to 7 tokens; bits may depend on the draft"),
    ],
)
def test_the_banner_says_whether_bits_depend_on_drafts(*, is_exact: bool, line: str) -> None:
    """The default has no line."""
    assert draft_lines(7, is_exact=is_exact) == [f"  drafts           {line}"]
    assert draft_lines(None, is_exact=is_exact) == []


@pytest.mark.parametrize("is_promised", [True, False])
def test_lines_say_which_promise_holds(embedded: Checkpoint, *, is_promised: bool) -> None:
    """Drafts are on by default where no bit depends on them."""
    line = self_check_line(is_loaded=True, has_same_bits=is_promised)
    assert line.endswith("to the bit" if is_promised else "within rounding")
    checkpoint = replace(embedded, report=replace(embedded.report, bitwise=is_promised))
    config = EngineConfig(kv_cache_tokens=64, max_model_len=64, max_draft_tokens=None)
    assert (draft_tokens(checkpoint, config) > 0) is is_promised


def test_config_check_promises_no_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known without a load."""
    module = "ropewalk.server.startup.planning.banner_lines"
    monkeypatch.setattr(f"{module}.long_prompt_tokens", lambda _: 0)
    settings = load_settings({"device": "cpu"})
    outlook = outlook_of(settings)
    on_gpu = replace(outlook, outline=replace(outlook.outline, device=torch.device("cuda")))
    lines = outlook_lines(settings, replace(on_gpu, rank_weight_bytes=1))
    assert "  self-check       not run; batch invariance within rounding" in lines
    assert any(line.startswith("  tensor parallel  1 ranks, within rounding;") for line in lines)
    exact = load_settings({"device": "cpu", "exact_batches": "true"})
    lines = outlook_lines(exact, on_gpu)
    assert "  self-check       not run; batch invariance is found at load" in lines
    kernels = next(line for line in lines if line.startswith("  kernels"))
    assert kernels.endswith("in one order of sums")


def test_exact_batches_on_a_gpu_refuses_what_has_other_orders_of_sums(
    embedded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal names the setting and its value; a CPU serves all of them."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for given, told in (
        ({"kv_cache_dtype": "fixed8"}, "needs kv_cache_dtype auto, got fixed8"),
        ({"activations": "int8"}, "needs activations exact, got int8"),
        ({"tensor_parallel_size": "2"}, "needs tensor_parallel_size 1, got 2"),
        ({"allowed_positions": "rerope"}, "serves the position method rerope"),
    ):
        settings = load_settings({"device": "cpu", **given})
        assert settings.exact_batches
        facts = model_facts(settings, embedded.native, 8192)
        plan_layout(settings, facts)
        with pytest.raises(SettingsError, match=told):
            plan_layout(settings, replace(facts, gpu_bytes=1 << 40))
    monkeypatch.setenv("ROPEWALK_EXACT_BATCHES", "false")
    assert not load_settings({}).exact_batches


def test_ranks_on_a_gpu_promise_no_bits_of_one_process() -> None:
    """A trial of a few rows would not find other bits there, so none is made."""
    shape = Shape(num_inputs=16, share=16, num_outputs=32, num_beside=0, has_bias=False)
    where = Where(0, 2, torch.float32, torch.device("cuda"), 1)
    assert not keeps_bits(shape, where)


GIB = 2**30


@pytest.mark.parametrize(
    ("gpu_gib", "stated", "expected"),
    [
        (None, {}, (32, 2048)),
        (39.4, {}, (128, 2048)),  # an A100 of 40 GB
        (44.4, {}, (256, 2048)),  # an L40S
        (79.1, {}, (256, 8192)),  # an H100
        (139.8, {"max_num_seqs": "4"}, (4, 8192)),
        (139.8, {"max_num_batched_tokens": "100"}, (100, 100)),
        (None, {"max_num_seqs": "4096"}, (4096, 4096)),
        (None, {"max_num_seqs": "5", "max_num_batched_tokens": "7"}, (5, 7)),
    ],
)
def test_the_limits_of_a_step_follow_the_device(
    embedded: Any, gpu_gib: float | None, stated: dict[str, str], expected: tuple[int, int]
) -> None:
    """The banner and `config check` name them, and the duration of a step with prompts."""
    memory = None if gpu_gib is None else int(gpu_gib * GIB)
    settings = load_settings(stated)
    facts = model_facts(settings, embedded.native, 1024, 64 * 2**20, gpu_bytes=memory)
    plan = plan_serving(settings, facts)
    config = plan.config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected
    seconds = 0.1 if gpu_gib is None else 0.25
    assert config.step_target_s == seconds
    steps = (
        f"  steps            up to {expected[0]} sequences (max_num_seqs) and {expected[1]} tokens"
    )
    line = step_line(config)
    assert line.startswith(steps)
    assert f"{seconds} s while" in line


def test_a_target_that_is_stated_holds_on_a_gpu(embedded: Any) -> None:
    """0 is none."""
    for stated, expected in (("0.05", 0.05), ("0", None)):
        settings = load_settings({"step_target_seconds": stated})
        facts = model_facts(settings, embedded.native, 1024, 64 * 2**20, gpu_bytes=140 * GIB)
        plan = plan_serving(settings, facts)
        assert plan.config.step_target_s == expected


def test_a_draft_that_no_step_holds_is_refused() -> None:
    """A step has a token beside the draft."""
    small = {"max_num_batched_tokens": "8", "max_num_seqs": "4"}
    assert load_settings({**small, "max_draft_tokens": "7"}).max_draft_tokens == 7
    assert load_settings({**small}).max_draft_tokens is None
    with pytest.raises(SettingsError, match=r"must be > max_draft_tokens \(8\), got 8"):
        load_settings({**small, "max_draft_tokens": "8"})
