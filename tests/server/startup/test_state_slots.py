"""The slots of models with states in the plan, the banner and the refusals."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.model_runtime import gpu_nodes
from ropewalk.model_runtime.cpu_kernels import trials
from ropewalk.model_runtime.engine.memory.cache_size import MemoryProfile
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.config_values import (
    state_shapes,
    text_values,
)
from ropewalk.model_runtime.loading.model_config import read_model_config
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.planning.banner_lines import describe
from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.serving_plan import ServingPlan, plan_serving
from ropewalk.studies.inspection.costs import cost_lines, costs_of
from tests.checkpoints.tiny_models import tiny_config, tiny_model
from tests.doubles.engines import checkpoint_of, tiny_checkpoint
from tests.doubles.planned import model_facts
from tests.doubles.tokens import byte_tokenizer_fast

MIB = 2**20


def planned(embedded: Any, **settings: str) -> ServingPlan:
    """A plan of a model with slots of a MiB, and a KiB for each token, on 64 MiB."""
    found = load_settings(settings)
    facts = model_facts(found, embedded.native, 1024, 64 * MIB, slot_bytes=MIB)
    return plan_serving(found, facts)


def test_slots_and_pages_share_the_memory_of_the_cache(embedded: Any) -> None:
    """Two slots for each sequence, and one for drafts, within half of the stated size."""
    plan = planned(embedded, kv_cache_gib="0.0625", max_num_seqs="8")
    assert plan.config.num_state_slots == 17
    assert plan.capacity == 47 * 1024
    assert plan.cache_bytes == 64 * MIB
    assert describe(plan)[-2:] == [
        "  KV cache         48128 tokens, 47 MiB in 752 pages of 64",
        "  states           17 MiB in 17 slots of 1 MiB; at most 8 sequences run, the other slots "
        "are for snapshots of prefixes, and drafts",
    ]


def test_without_drafts_no_slot_is_for_them(embedded: Any) -> None:
    """The memory goes to pages."""
    plan = planned(embedded, kv_cache_gib="0.0625", max_num_seqs="8", max_draft_tokens="0")
    assert (plan.config.num_state_slots, plan.capacity) == (16, 48 * 1024)


def test_few_slots_bound_the_sequences_that_run(embedded: Any) -> None:
    """The half of 16 MiB holds eight slots, so eight of 32 sequences run."""
    plan = planned(embedded, kv_cache_gib=str(16 / 1024))
    assert (plan.config.num_state_slots, plan.config.max_num_seqs) == (8, 8)


def test_without_a_size_slots_take_at_most_half(embedded: Any) -> None:
    """64 MiB are affordable, and two slots for each of 32 sequences would take all of it."""
    plan = planned(embedded)
    assert plan.config.num_state_slots == 32
    assert plan.cache_bytes <= 64 * MIB


def test_a_size_in_tokens_is_for_pages_alone(embedded: Any) -> None:
    """The slots come on top, as the banner says."""
    plan = planned(embedded, kv_cache_tokens="4096")
    assert (plan.capacity, plan.config.num_state_slots) == (4096, 65)


def test_memory_for_less_than_a_slot_and_a_page_is_refused(embedded: Any) -> None:
    """The sentence names the setting, the states and the value."""
    with pytest.raises(SettingsError, match=r"kv_cache_gib: must have .* 1 MiB of states, got"):
        planned(embedded, kv_cache_gib=str(1 / 1024))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 3.5 as a checkpoint."""
    made = tmp_path_factory.mktemp("qwen3_5")
    tiny_model("qwen3_5_text").save_pretrained(made)
    byte_tokenizer_fast().save_pretrained(made)
    return made


def test_the_dry_run_and_inspect_count_the_states(folder: Path) -> None:
    """Both tell the bytes of a sequence's states, which do not depend on its length."""
    settings = load_settings({"model": str(folder), "kv_cache_tokens": "4096", "max_num_seqs": "4"})
    outlook = outlook_of(settings)
    lines = outlook_lines(settings, outlook)
    assert any("states" in line and "9 slots" in line for line in lines)
    costs = costs_of(outlook.outline, outlook.plan.layout, 512, None, max_chunk=512)
    assert costs.state_bytes == outlook.plan.layout.slot_bytes > 0
    assert any(line.startswith("states ") for line in cost_lines(costs, "cpu"))


def test_a_gpu_without_triton_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names the class, the reason and the device."""
    shutil.copytree(folder, tmp_path / "model")
    outline = read_model_config(tmp_path / "model", device="cpu")
    on_gpu = type(outline)(outline.source, outline.config, outline.dtype, torch.device("cuda"))
    monkeypatch.setattr(gpu_nodes, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"Qwen3_5ForCausalLM has .* triton .*, got .* cuda"):
        on_gpu.native()
    monkeypatch.setattr(gpu_nodes, "find_spec", lambda _: True)
    assert on_gpu.native().native_len == outline.native().native_len


def test_the_slots_of_a_gpu_are_beside_what_a_step_was_measured_to_need(embedded: Any) -> None:
    """The measured step has one slot only, and there is none for drafts."""
    memory = MemoryProfile(1000 * MIB, 20 * MIB, 600 * MIB, 60 * MIB, 20 * MIB)
    on_gpu = {"gpu_bytes": 1000 * MIB, "measure": lambda *_: memory}
    settings = load_settings({"max_num_seqs": "64", "gpu_memory_utilization": "0.9"})
    facts = model_facts(settings, embedded.native, 1024, 200 * MIB, slot_bytes=MIB, **on_gpu)
    plan = plan_serving(settings, facts)
    assert plan.config.num_state_slots == 100  # half of what may be affordable
    assert plan.config.max_draft_tokens == 0
    assert plan.cache_bytes == 200 * MIB
    assert plan.capacity == 100 * 1024
    with pytest.raises(SettingsError, match=r"max_draft_tokens: must be 0 .* on a GPU, got 3"):
        plan_serving(load_settings({"max_draft_tokens": "3"}), facts)


def test_a_hybrid_on_a_gpu_is_planned_with_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the engine would allocate more than the plan knows."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * 2**30, 80 * 2**30))
    checkpoint = tiny_checkpoint("qwen3_5_text")
    on_gpu = replace(checkpoint, device=torch.device("cuda:0"))
    facts = facts_of(on_gpu, load_settings({}))
    assert facts.layout.slot_bytes > 0
    assert facts.is_on_gpu


def test_a_class_that_is_served_nowhere_is_not_promised_on_a_cpu() -> None:
    """OLMo Hybrid has Qwen's fields and other layers, whose class a load names on any device."""
    config = tiny_config("olmo_hybrid")
    assert state_shapes(text_values(config)) == {}
    with pytest.raises(ModelError, match="OlmoHybridGatedDeltaNet mixes tokens by a state"):
        tiny_checkpoint("olmo_hybrid")


def test_a_processor_whose_kernels_fail_is_told_as_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The class is served, so the sentence does not say that it is not."""
    monkeypatch.setattr(trials, "kernel_fault", lambda: "LoweringError: no such vectors")
    with pytest.raises(ModelError, match=r"need the compiled kernels .* no such vectors$"):
        checkpoint_of(tiny_model("qwen3_5_text"))


def test_layers_with_other_states_are_refused_by_their_class() -> None:
    """The self-check says that a logit differs, and a probe finds the layer."""
    with pytest.raises(ModelError, match="FalconH1Mixer mixes tokens by a state of each sequence"):
        tiny_checkpoint("falcon_h1")
