"""The files whose faults `python -m tests.mutants` draws, and the tests nearest to them."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_RUNTIME = "tests/model_runtime"
_SCHEDULING = f"{_RUNTIME}/scheduling"
_DISK = f"{_RUNTIME}/engine/kv_disk"
_API = "tests/server/api"


@dataclass(frozen=True)
class Target:
    """Files whose faults are drawn, and the tests of `make test` for them, nearest first."""

    patterns: tuple[str, ...]  # of files of `ropewalk/`
    tests: tuple[str, ...]

    def files(self) -> list[Path]:
        """Return the files. Raises ValueError for a pattern that matches none."""
        found = []
        for pattern in self.patterns:
            files = [
                each
                for each in sorted((ROOT / "ropewalk").glob(pattern))
                if each.name != "__init__.py"
            ]
            if not files:
                raise ValueError(f"no file matches {pattern!r} of tests/mutation_targets.py")
            found += files
        return found


# The name of a part -> its files and their tests, which take a minute at most.
TARGETS = {
    "scheduler": Target(
        tuple(
            f"model_runtime/scheduling/{name}.py"
            for name in (
                "scheduler",
                "prefill",
                "prefill_budget",
                "sequence",
                "step_*",
                "read_plan",
            )
        ),
        (
            *(
                f"{_SCHEDULING}/test_{name}.py"
                for name in ("sequence", "scheduler", "step_cost", "prefill_budget")
            ),
            f"{_RUNTIME}/engine/test_engine.py",
            *(
                f"{_SCHEDULING}/test_{name}.py"
                for name in ("windows", "prefix_cache", "kept_pages")
            ),
            f"{_DISK}/test_host_memory.py",
            f"{_SCHEDULING}/test_following_steps.py",
            f"{_RUNTIME}/engine/test_step_ahead.py",
            f"{_RUNTIME}/engine/test_mixed_steps_ahead.py",
        ),
    ),
    "page pool": Target(
        ("model_runtime/scheduling/page_pool.py", "model_runtime/scheduling/sequence_pages.py"),
        tuple(
            f"{_SCHEDULING}/test_{name}.py"
            for name in ("page_pool", "scheduler", "windows", "kept_pages", "prefix_cache")
        ),
    ),
    "prefix cache": Target(
        ("model_runtime/scheduling/prefix_cache.py",),
        tuple(
            f"{_SCHEDULING}/test_{name}.py"
            for name in ("page_pool", "scheduler", "windows", "prefix_cache", "kept_pages")
        ),
    ),
    "windows": Target(
        (
            "model_runtime/page_groups.py",
            "model_runtime/attention/step_ranges.py",
            "model_runtime/attention/cache_layout.py",
        ),
        (
            f"{_SCHEDULING}/test_windows.py",
            f"{_RUNTIME}/runner/test_windows.py",
            "tests/server/startup/test_windows.py",
        ),
    ),
    "states": Target(
        ("model_runtime/scheduling/sequence_states.py", "model_runtime/attention/state_store.py"),
        (
            f"{_SCHEDULING}/test_sequence_states.py",
            "tests/server/startup/test_state_slots.py",
            "tests/promises/test_states.py",
        ),
    ),
    "drafts": Target(
        (
            "model_runtime/scheduling/drafts/*.py",
            "model_runtime/engine/speculator.py",
        ),
        (
            f"{_SCHEDULING}/test_drafts.py",
            f"{_SCHEDULING}/test_ngram.py",
            f"{_RUNTIME}/engine/test_speculation.py",
            f"{_RUNTIME}/engine/test_device_speculation.py",
        ),
    ),
    "sampler": Target(
        tuple(
            f"model_runtime/runner/{name}.py"
            for name in ("sampler", "ranked_draw", "penalties", "bad_words")
        ),
        (
            f"{_RUNTIME}/runner/test_sampler.py",
            f"{_RUNTIME}/runner/test_ranked_draw.py",
            f"{_API}/test_bad_words.py",
        ),
    ),
    "rope": Target(
        ("rope/*.py",),
        (
            *(
                f"tests/rope/test_{name}.py"
                for name in ("tiers", "formulas", "from_config", "trained_positions", "angles")
            ),
            f"{_RUNTIME}/deployments/test_position_tiers.py",
            *(f"tests/rope/test_{name}.py" for name in ("transformers_parity", "decay")),
        ),
    ),
    "deployment": Target(("model_runtime/deployments/*.py",), (f"{_RUNTIME}/deployments",)),
    "attention": Target(
        tuple(
            f"model_runtime/attention/{name}.py"
            for name in ("batch", "cpu_backend", "work_list", "prompt_groups", "rope_tables")
        ),
        tuple(
            f"{_RUNTIME}/{name}.py"
            for name in (
                *("attention/test_batch", "attention/test_work_list"),
                *("attention/test_prompt_groups", "attention/test_rope_tables"),
                *("attention/test_cpu_backend", "cpu_kernels/test_attention_dot"),
            )
        ),
    ),
    # A GPU's, which Triton interprets.
    "kernels of a GPU": Target(
        tuple(
            f"model_runtime/gpu/{name}.py"
            for name in (
                *("attend", "decode", "gate", "prefill_parts", "rms_norm", "rotate"),
                *("exact/attention", "exact/product", "sampling/draw_ranked", "states/delta_rule"),
            )
        ),
        tuple(
            f"{_RUNTIME}/{name}.py"
            for name in (
                *("gpu/test_fewer_kernels", "gpu/test_exact", "gpu/test_draw_ranked"),
                *("gpu/test_gpu_states", "attention/test_triton_ranges"),
                *("attention/test_triton_prefill", "attention/test_triton_backend"),
            )
        ),
    ),
    "quantised pages": Target(
        ("model_runtime/attention/quantised/*.py",),
        (f"{_RUNTIME}/attention/test_quantised_pages.py", "tests/promises/test_any_serving.py"),
    ),
    "packed weights": Target(
        ("model_runtime/layers/packed_*.py", "model_runtime/tracing/passes.py"),
        tuple(
            f"{_RUNTIME}/layers/test_{name}.py"
            for name in ("cheaper_layers", "packed_linear", "packed_product")
        ),
    ),
    "step": Target(
        ("model_runtime/engine/output_processor.py", "model_runtime/engine/admission.py"),
        tuple(
            f"{_RUNTIME}/engine/test_{name}.py" for name in ("admission", "stop_logprobs", "engine")
        ),
    ),
    "memory": Target(
        ("model_runtime/engine/memory/*.py",),
        (
            f"{_RUNTIME}/engine/test_memory_profile.py",
            f"{_RUNTIME}/engine/test_machine_memory.py",
            "tests/server/startup/test_cache_size.py",
        ),
    ),
    "pages on disk": Target(
        (
            "model_runtime/engine/kv_disk/*.py",
            "model_runtime/engine/kv_disk/files/*.py",
            "model_runtime/engine/kv_disk/offload/*.py",
        ),
        tuple(
            f"{_DISK}/test_{name}.py"
            for name in ("page_file", "writer", "lower_store", "keys", "host_memory", "faults")
        ),
    ),
    "pages in a store": Target(
        ("model_runtime/engine/kv_disk/stores/*.py",),
        tuple(f"{_DISK}/test_{name}.py" for name in ("store_url", "store_answers", "valkey_store")),
    ),
    "GGUF": Target(
        ("model_runtime/formats/gguf/*.py",),
        tuple(
            f"{_RUNTIME}/formats/test_gguf_{name}.py"
            for name in ("file", "tensors", "tokenizer", "rope", "architectures", "hybrids")
        ),
    ),
    "quantised safetensors": Target(
        ("model_runtime/formats/*.py",),
        tuple(f"{_RUNTIME}/formats/test_quantised_{name}.py" for name in ("refusals", "weights")),
    ),
    "JSON schemas": Target(
        ("model_runtime/text/schema_*.py",),
        (f"{_RUNTIME}/text/test_schema_keywords.py",),
    ),
    "service": Target(
        ("server/api/service.py", "server/api/generation_response.py"),
        tuple(
            f"{_API}/test_{name}.py"
            for name in (
                *("stream_events", "candidates", "completions", "response_format"),
                *("open_answers", "names_and_order", "models", "prediction"),
            )
        ),
    ),
    "schemas": Target(
        ("server/api/*_schema.py", "server/api/strict_body.py", "server/api/parts/*.py"),
        tuple(
            f"{_API}/test_{name}.py"
            for name in (
                *("several_mistakes", "nulls", "bad_input", "prediction", "response_format"),
                *("positions", "foreign_fields"),
            )
        ),
    ),
    "schemas of turns": Target(
        ("server/turns/*_schema.py",),
        (
            f"{_API}/tools/test_bad_tools.py",
            f"{_API}/responses",
            f"{_API}/messages",
            f"{_API}/test_chat.py",
            f"{_API}/tools/test_tool_calls.py",
        ),
    ),
    "fleet": Target(
        ("server/router/fleet/*.py", "server/router/replay.py"),
        tuple(
            f"tests/server/router/test_{name}.py"
            for name in ("fleet", "replay", "fleet_stats", "fingerprint")
        ),
    ),
    "choice of a replica": Target(
        ("server/replicas/*.py",),
        ("tests/server/replicas", "tests/server/router/test_body_chunks.py"),
    ),
    "limits of keys": Target(
        ("server/access/allowance.py", "server/access/key*.py"),
        ("tests/server/access/test_allowance.py", "tests/server/access/test_keys.py"),
    ),
    "doctor": Target(("studies/doctor/*.py",), ("tests/studies/doctor",)),
    "inspection": Target(
        ("studies/inspection/*.py",),
        tuple(
            f"tests/studies/inspection/test_{name}.py"
            for name in (
                *("head_statistics", "report", "quantised_lines", "inspected_attention"),
                *("seen_distances", "expected_scores"),
            )
        ),
    ),
}
