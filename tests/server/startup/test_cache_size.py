"""The cache's size, if none is given: measured on a GPU, a share of the memory elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.memory import cache_size
from ropewalk.model_runtime.engine.memory.cache_size import MemoryProfile, affordable_bytes
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory
from ropewalk.model_runtime.engine.memory.memory_profile import CudaMeter
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import KVShape
from ropewalk.rope import Profile
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.planning import dry_run, model_facts
from ropewalk.server.startup.planning.banner_lines import describe
from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of, refuse_ahead
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.planned_deployments import num_profiles, profiles_of
from ropewalk.server.startup.planning.serving_plan import plan_serving
from tests.doubles.planned import model_facts as planned_facts

GIB = 2**30
CUDA = torch.device("cuda:0")
# 80 GiB, of which 0.9 are 72: the step and graphs leave 3.
MEMORY = MemoryProfile(80 * GIB, 2 * GIB, 60 * GIB, 6 * GIB, 1 * GIB)


@pytest.fixture
def on_cuda(embedded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """The embedded model as if it were on a GPU of 80 GiB, 20 of them taken."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    return replace(embedded, device=CUDA)


def facts(embedded: Checkpoint, memory: MemoryProfile, asked: list[Any] | None = None) -> Any:
    """The facts of a GPU that measures `memory`; `asked` collects the measured configs."""

    def measure(config: EngineConfig, profiles: Sequence[Profile]) -> MemoryProfile:
        if asked is not None:
            asked.append((config, profiles))
        return memory

    on_gpu = {"gpu_bytes": memory.total_bytes, "measure": measure}
    return planned_facts(load_settings({}), embedded.native, 8192, **on_gpu)


def test_a_measured_step_leaves_the_rest_to_the_cache(embedded: Checkpoint) -> None:
    """The cache has whole pages, and the banner lists the memory beside it."""
    asked: list[Any] = []
    settings = load_settings({"max_num_seqs": "2000"})
    plan = plan_serving(settings, facts(embedded, MEMORY, asked))
    assert plan.cache_bytes == 3 * GIB
    assert plan.config.max_model_len == 2048
    (config, profiles), *others = asked
    assert not others
    assert (config.max_model_len, config.max_num_seqs) == (2048, 2000)
    assert set(profiles) == {tier.profile for tier in plan.deployments[0].own_tiers}
    assert describe(plan)[-2:] == [
        "  KV cache         393216 tokens, 3 GiB in 6144 pages of 64",
        "    beside it      60 GiB weights, 6 GiB for a step (measured), 1 GiB for graphs, "
        "2 GiB outside torch, of 80 GiB",
    ]


def test_no_more_than_all_contexts_need(embedded: Checkpoint) -> None:
    """The limit is max_num_seqs times the longest context, as without a GPU."""
    plan = plan_serving(load_settings({"max_num_seqs": "3"}), facts(embedded, MEMORY))
    assert plan.capacity == 3 * 2048


def test_a_context_is_no_longer_than_the_cache(embedded: Checkpoint) -> None:
    """The cache may be a single page."""
    memory = replace(MEMORY, step_bytes=MEMORY.step_bytes + 3 * GIB - 64 * 8192)
    plan = plan_serving(load_settings({}), facts(embedded, memory))
    assert (plan.capacity, plan.config.max_model_len) == (64, 64)


@pytest.mark.parametrize(
    ("step_bytes", "left"),
    [
        (9 * GIB - 1, "1 B are left"),
        (11 * GIB, "2 GiB are missing"),
    ],
)
def test_no_room_for_a_page_is_told_with_all_numbers(
    embedded: Checkpoint, step_bytes: int, left: str
) -> None:
    """The message about missing room also names the settings that make room."""
    memory = replace(MEMORY, step_bytes=step_bytes)
    with pytest.raises(SettingsError) as raised:
        plan_serving(load_settings({}), facts(embedded, memory))
    told = str(raised.value)
    assert told.startswith(
        "gpu_memory_utilization 0.9 leaves no room for a page of the KV cache (64 tokens, 512 KiB)"
    )
    assert left in told
    for each in ("60 GiB weights", "2 GiB outside torch", "of 80 GiB", "max_num_batched_tokens"):
        assert each in told


@pytest.mark.parametrize("size", [{"kv_cache_tokens": "640"}, {"kv_cache_gib": "0.005"}])
def test_a_size_that_is_given_is_not_measured(embedded: Checkpoint, size: dict[str, str]) -> None:
    """The banner of a given size has no line about a measurement."""
    asked: list[Any] = []
    plan = plan_serving(load_settings(size), facts(embedded, MEMORY, asked))
    assert plan.capacity == 640
    assert (asked, plan.memory) == ([], None)
    assert not any("measured" in line for line in describe(plan))


def test_a_model_on_a_gpu_is_measured_there(
    on_cuda: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement gets the share from the settings."""
    asked: list[Any] = []

    def profile_memory(*arguments: Any, **_: Any) -> MemoryProfile:
        asked.append(arguments)
        return MEMORY

    monkeypatch.setattr(model_facts, "profile_memory", profile_memory)
    settings = load_settings({"gpu_memory_utilization": "0.9", "max_num_seqs": "2000"})
    assert plan_serving(settings, facts_of(on_cuda, settings)).memory == MEMORY
    ((checkpoint, config, _, utilization, meter),) = asked
    assert (checkpoint, utilization) == (on_cuda, 0.9)
    assert config.max_num_seqs == 2000
    assert isinstance(meter, CudaMeter)


@pytest.mark.parametrize("allowed", [None, ["yarn"]])
def test_a_plan_has_room_for_every_profile_of_a_request(
    embedded: Checkpoint, allowed: list[str] | None
) -> None:
    """A request may name each allowed method, on each tier."""
    given = {} if allowed is None else {"allowed_rope_types": ",".join(allowed)}
    settings = load_settings({"model": "some", "served_model_name": "some", **given})
    plan = plan_serving(settings, planned_facts(settings, embedded.native, 512, 2**30))
    deployment = make_deployment(
        "some", embedded.native, DeploymentOptions(allowed_rope_types=allowed)
    )
    profiles = {tier.profile for tiers in deployment.tiers.values() for tier in tiers.ascending}
    assert plan.config.num_rope_tables == num_profiles([deployment]) == len(profiles)
    own = set(profiles_of(plan.deployments))
    assert own <= profiles
    assert (len(own) == len(profiles)) is (allowed == ["yarn"])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> MachineMemory:
    """A machine of 64 GiB, 40 of them free, and 8 of swap."""
    memory = MachineMemory(64 * GIB, 40 * GIB, 8 * GIB)
    for module in (cache_size, dry_run, model_facts):
        monkeypatch.setattr(module, "machine_memory", lambda: memory)
    return memory


@pytest.mark.usefixtures("machine")
def test_on_a_cpu_nothing_is_run_and_the_share_is_not_read(embedded: Checkpoint) -> None:
    """The cache gets a quarter of the memory that is free."""
    on_cpu = replace(embedded, device=torch.device("cpu"))
    for share in ("0.1", "0.9"):
        found = facts_of(on_cpu, load_settings({"gpu_memory_utilization": share}))
        assert found.measure is None
        assert found.affordable_bytes == 10 * GIB


@pytest.mark.usefixtures("machine")
def test_before_a_load_the_weights_are_taken_from_the_free_memory() -> None:
    """A plan before the load has the size of one after it."""
    assert affordable_bytes(torch.device("cpu"), 0.9, 12 * GIB) == 7 * GIB
    assert affordable_bytes(torch.device("cpu"), 0.9, 50 * GIB) == 0


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("gib", "told"),
    [
        (70, "kv_cache_gib: weights and KV cache need 70 GiB, this machine has 64 GiB"),
        (49, "kv_cache_gib: weights and KV cache need 49 GiB, 40 GiB of this machine's 64 GiB are"),
        (47, None),  # in swap
    ],
)
def test_a_cache_that_finds_no_memory_is_refused_before_the_load(
    gib: int, told: str | None
) -> None:
    """Memory that is taken now may be free later, so `config check` only shows it."""
    settings = load_settings({"kv_cache_gib": str(gib), "device": "cpu"})
    if told is None:
        refuse_ahead(settings)
    else:
        with pytest.raises(SettingsError, match=told):
            refuse_ahead(settings)
    if gib < 64:
        assert "of 64 GiB (40 GiB are free now)" in "".join(
            outlook_lines(settings, outlook_of(settings))
        )
    else:
        with pytest.raises(SettingsError, match=told):
            outlook_of(settings)


@pytest.mark.usefixtures("machine")
def test_a_loaded_models_cache_needs_free_memory(embedded: Checkpoint) -> None:
    """The sizes of the loaded model count, whatever its config has promised."""
    settings = load_settings({"kv_cache_tokens": str(49 * GIB // 4096)})
    facts = facts_of(embedded, settings)
    facts = replace(facts, layout=replace(facts.layout, layers={0: KVShape(1, 512, 512)}))
    with pytest.raises(SettingsError, match="kv_cache_tokens: the pages of the KV cache need 49"):
        plan_serving(settings, facts)


@pytest.mark.usefixtures("on_cuda")
def test_without_weights_a_tenth_is_guessed_for_a_step() -> None:
    """The tenth is of the share less the memory in use and the weights."""
    assert affordable_bytes(CUDA, 0.9, 12 * GIB) == (72 - 20 - 12) * GIB * 9 // 10
    assert affordable_bytes(CUDA, 0.3, 12 * GIB) == 0
