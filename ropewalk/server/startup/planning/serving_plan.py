"""The serving plan: the size of the cache and the limits, from settings and facts about a model.

Planning needs no weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ropewalk.model_runtime.attention.sealed.page_format import (
    EXACT,
    FORMATS,
    ROUNDED,
    most_staged,
)
from ropewalk.model_runtime.config import EngineConfig, tier_setting, with_slots
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.memory.cache_size import MemoryProfile, sized
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory
from ropewalk.model_runtime.page_groups import LayerShape, PageGroups, refuse_releases
from ropewalk.model_runtime.size_text import size_text
from ropewalk.rope import NativeRope, Profile
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.planning.held_windows import padded, planned_groups
from ropewalk.server.startup.planning.planned_deployments import (
    fitted,
    most_pages_held,
    num_profiles,
    plan_deployments,
    profiles_of,
    within_cache,
)

MAX_CONTEXT_BUCKETS = 12  # with +Inf; each one adds a whole histogram per metric
# By default; it follows longer decode steps. A GPU's steps have more tokens.
_STEP_TARGET_S, _STEP_TARGET_ON_GPU_S = 0.1, 0.25


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that planning needs about a model, loaded or only outlined."""

    native: NativeRope
    token_bytes: int  # of KV cache per token, on all ranks
    affordable_bytes: int  # for the cache if the settings give no size
    # On a GPU, a more exact measurement, which runs a step of the loaded model.
    measure: Callable[[EngineConfig, Sequence[Profile]], MemoryProfile] | None = None
    num_ranks: int = 1  # processes that hold the model together
    memory: MachineMemory | None = None  # None: the cache is elsewhere, as on a GPU
    gpu_bytes: int | None = None  # of the GPU's memory, also what others use; None: a CPU
    host: MachineMemory | None = None  # the machine's, wherever the cache is; None: not looked at
    weight_bytes: int = 0  # that are not loaded yet, of all ranks
    slot_bytes: int = 0  # of a sequence's states; 0: the model has none
    drafts_states: bool = True  # whether a model with states is served with drafts, as on a CPU
    open_bytes: int = 0  # of a sequence's open page; 0: no page is sealed
    stage_page_bytes: int = 0  # of a staged page of one layer; 0: no page is sealed
    rounds: bool = False  # whether float32 keys and values are cached in bfloat16
    windows: Mapping[int, int | None] = field(default_factory=dict)  # keys that each layer reads
    shapes: Mapping[int, LayerShape] = field(
        default_factory=dict
    )  # of each layer's keys and values


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Deployments and engine limits that are consistent with each other."""

    deployments: tuple[Deployment, ...]
    config: EngineConfig
    context_bounds: tuple[int, ...]  # of the metrics' context_bucket
    token_bytes: int
    memory: MemoryProfile | None = None  # set if the cache size follows from it
    num_ranks: int = 1
    slot_bytes: int = 0  # of a sequence's states; 0: the model has none
    open_page_bytes: int = 0  # of a sequence's open page; 0: no page is sealed
    stage_page_bytes: int = 0  # of a staged page of one layer; 0: no page is sealed
    rounds: bool = False  # whether float32 keys and values are cached in bfloat16
    why_whole: str | None = None  # why layers with windows keep all tokens; None: they do not

    @property
    def rank_cache_bytes(self) -> int:
        return self.cache_bytes // self.num_ranks

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the cache holds in whole pages."""
        return self.config.capacity

    @property
    def cache_parts(self) -> dict[str, int]:
        """Return the bytes of the cache by part, of those that there are."""
        parts = {
            "pages": self.capacity * self.token_bytes,
            "open": self.open_bytes,
            "stage": self.stage_bytes,
            "states": self.state_bytes,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def cache_bytes(self) -> int:
        return sum(self.cache_parts.values())

    @property
    def page_bytes(self) -> int:
        """Return the size of a page of one group of layers in bytes, on all ranks."""
        return self.token_bytes * self.config.page_size // self.config.num_groups

    @property
    def open_bytes(self) -> int:
        """Return the size of the open pages of all sequences in bytes."""
        return self.config.max_num_seqs * self.open_page_bytes

    @property
    def stage_bytes(self) -> int:
        """Return the size of the most pages that a step stages in bytes."""
        return _stage_bytes(self.config, self.stage_page_bytes)

    @property
    def state_bytes(self) -> int:
        """Return the size of all slots of states in bytes."""
        return self.config.num_state_slots * self.slot_bytes


def plan_serving(settings: ServeSettings, facts: ModelFacts) -> ServingPlan:
    """Build the plan that follows from settings and model. Raises SettingsError or ModelError."""
    deployments, groups, why_whole = plan_layout(settings, facts)
    config, memory = _config(settings, facts, deployments, groups)
    deployments = within_cache(settings, deployments, config)
    bounds = context_buckets(facts.native.native_len, config.max_model_len)
    token_bytes = padded(facts.token_bytes, config.page_groups)
    held = facts.slot_bytes, facts.open_bytes, facts.stage_page_bytes, facts.rounds
    sizes = token_bytes, memory, facts.num_ranks, *held
    return ServingPlan(deployments, config, bounds, *sizes, why_whole)


def plan_layout(
    settings: ServeSettings, facts: ModelFacts
) -> tuple[tuple[Deployment, ...], PageGroups | None, str | None]:
    """Return the deployments, the groups of layers that share pages, and why there are none.

    Raises SettingsError or ModelError for all that is refused whatever the size of the cache is.
    """
    _refuse_disk(settings, facts)
    if settings.kv_cache_dtype == ROUNDED and facts.memory is None:
        raise SettingsError(
            f"kv_cache_dtype {ROUNDED} needs the model on a CPU; on a GPU it must be "
            f"{', '.join((EXACT, *FORMATS))}"
        )
    deployments = plan_deployments(settings, facts.native)
    refuse_releases(profiles_of(deployments), facts.native.tables)
    longest = max(each.max_len for each in deployments)
    layers = facts.windows, facts.shapes
    groups, why_whole = planned_groups(*layers, longest, has_states=facts.slot_bytes > 0)
    _refuse_sizes_of_tier(settings, facts, groups)
    return deployments, groups, why_whole


def _refuse_sizes_of_tier(
    settings: ServeSettings, facts: ModelFacts, groups: PageGroups | None
) -> None:
    """Raise ModelError if a tier of pages below the cache is too small, or finds no memory."""
    if tier_setting(settings) is None or facts.host is None:
        return
    from ropewalk.model_runtime.engine.kv_disk.least_sizes import (  # noqa: PLC0415  # rare
        refuse_sizes,
    )

    num_groups = 1 if groups is None else groups.num_groups
    page_bytes = padded(facts.token_bytes, groups) * settings.page_size // num_groups
    refuse_sizes(settings, page_bytes, facts.host)


def _refuse_disk(settings: ServeSettings, facts: ModelFacts) -> None:
    """Raise SettingsError if the model's cache can have no tier on disk."""
    name = tier_setting(settings)
    if name is None:
        return
    # The address of a store may hold a password.
    given = f", got {settings.kv_disk}" if name == "kv_disk" else ""
    if facts.memory is None and settings.kv_offload_gib is None:
        raise SettingsError(
            f"{name} needs the model on a CPU, or kv_offload_gib beside it on a GPU{given}"
        )
    if facts.memory is not None and settings.kv_offload_gib is not None:
        raise SettingsError(
            "kv_offload_gib is for a GPU: on a CPU the KV cache is host memory already, so raise "
            f"kv_cache_gib, got {settings.kv_offload_gib:g}"
        )
    if facts.slot_bytes:
        raise SettingsError(
            f"{name} is for models whose layers all keep keys and values; this model has layers "
            f"that keep a state, which no page holds{given}"
        )


def memory_text(memory: MemoryProfile) -> str:
    """Describe the memory that is used beside the cache."""
    return (
        f"{size_text(memory.weight_bytes)} weights, {size_text(memory.step_bytes)} for a step "
        f"(measured), {size_text(memory.graph_bytes)} for graphs, "
        f"{size_text(memory.outside_bytes)} outside torch, of {size_text(memory.total_bytes)}"
    )


def _config(
    settings: ServeSettings,
    facts: ModelFacts,
    deployments: Sequence[Deployment],
    groups: PageGroups | None,
) -> tuple[EngineConfig, MemoryProfile | None]:
    target_s = settings.step_target_seconds
    default_s = _STEP_TARGET_S if facts.gpu_bytes is None else _STEP_TARGET_ON_GPU_S
    alike = {each.name for each in fields(EngineConfig)} & set(ServeSettings.model_fields)
    stated: dict[str, Any] = {each: getattr(settings, each) for each in alike}
    stated |= {
        **step_limits(settings, facts.gpu_bytes),
        "kv_cache_tokens": settings.kv_cache_tokens or 0,
        "max_model_len": max(each.max_len for each in deployments),
        "num_rope_tables": num_profiles(deployments),
        "step_target_s": default_s if target_s is None else target_s or None,
        "step_target_follows": target_s is None,
        "page_groups": groups,
    }
    config = EngineConfig(**stated)
    token_bytes = padded(facts.token_bytes, config.page_groups)
    memory = None
    size_gib = settings.kv_cache_gib
    if facts.slot_bytes and not facts.drafts_states:
        config = _without_drafts(config)
    config, slots_bytes = with_slots(
        config, facts.slot_bytes, facts.affordable_bytes, settings.kv_cache_tokens, size_gib
    )
    stage_bytes = _stage_bytes(config, facts.stage_page_bytes)
    beside_bytes = slots_bytes + config.max_num_seqs * facts.open_bytes + stage_bytes
    affordable = max(0, facts.affordable_bytes - beside_bytes)
    if settings.kv_cache_tokens is None:
        if settings.kv_cache_gib is None and facts.measure is not None:
            memory = facts.measure(config, profiles_of(deployments))
            rank_bytes = token_bytes // facts.num_ranks
            page_bytes = config.page_size * rank_bytes
            affordable = _left(settings, memory, page_bytes, slots_bytes) * facts.num_ranks
        pages_gib = None if size_gib is None else max(0.0, size_gib - beside_bytes / 2**30)
        most_pages = most_pages_held(deployments, config)
        config = sized(config, token_bytes, affordable, pages_gib, most_pages)
    _refuse_shortage(settings, facts, config.capacity * token_bytes + beside_bytes)
    if config.capacity == 0:
        given = "kv_cache_tokens" if settings.kv_cache_tokens is not None else "kv_cache_gib"
        size = getattr(settings, given)
        raise SettingsError(
            f"{given}: must hold at least one page of {config.page_size} tokens (page_size)"
            + (f" beside {size_text(slots_bytes)} of states" if slots_bytes else "")
            + _beside(config, facts)
            + ("" if size is None else f", got {size:g}")
        )
    longest = max(each.max_len for each in fitted(deployments, config))
    return replace(config, max_model_len=longest), memory


def step_limits(settings: ServeSettings, gpu_bytes: int | None) -> dict[str, int]:
    """Return max_num_seqs and max_num_batched_tokens, with the defaults of a device.

    `gpu_bytes`: of the GPU's memory; None: a CPU. A GPU of 80 GB has 79 GiB, one of 40 GB 39.
    """
    num_seqs, num_tokens = 32, 2048
    if gpu_bytes is not None:
        num_seqs = 256 if gpu_bytes >= 40 * 2**30 else 128
        num_tokens = 8192 if gpu_bytes >= 70 * 2**30 else 2048
    stated_seqs, stated_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    return {
        "max_num_seqs": stated_seqs or min(num_seqs, stated_tokens or num_seqs),
        "max_num_batched_tokens": stated_tokens or max(num_tokens, stated_seqs or 0),
    }


def _without_drafts(config: EngineConfig) -> EngineConfig:
    """Return the config without drafts. Raises SettingsError if the settings ask for them."""
    if config.max_draft_tokens:
        raise SettingsError(
            "max_draft_tokens: must be 0 for a model with states on a GPU, got "
            f"{config.max_draft_tokens}"
        )
    return replace(config, max_draft_tokens=0)


def _stage_bytes(config: EngineConfig, page_bytes: int) -> int:
    """Return the bytes of the most pages that a step stages, for one layer at a time."""
    step = config.max_num_batched_tokens, config.max_num_seqs, config.page_size
    return most_staged(*step) * page_bytes


def _beside(config: EngineConfig, facts: ModelFacts) -> str:
    """Return a clause with the exact pages of all sequences; empty if no page is sealed."""
    if not facts.open_bytes:
        return ""
    opened = size_text(config.max_num_seqs * facts.open_bytes)
    staged = size_text(_stage_bytes(config, facts.stage_page_bytes))
    return (
        f" beside {opened} of open pages for {config.max_num_seqs} sequences (max_num_seqs) and "
        f"{staged} of a step (max_num_batched_tokens)"
    )


def _refuse_shortage(settings: ServeSettings, facts: ModelFacts, cache_bytes: int) -> None:
    """Raise SettingsError if the machine has no room for the cache and the weights to come."""
    if facts.memory is None:
        return
    what = "weights and KV cache" if facts.weight_bytes else "the pages of the KV cache"
    shortage = facts.memory.shortage(cache_bytes + facts.weight_bytes, what)
    if shortage is None:
        return
    stated = ("kv_cache_gib", "kv_cache_tokens")
    given = next((name for name in stated if getattr(settings, name) is not None), None)
    raise SettingsError(shortage if given is None else f"{given}: {shortage}")


def _left(settings: ServeSettings, memory: MemoryProfile, page_bytes: int, slots_bytes: int) -> int:
    """Return the bytes left for pages, at least for one. Raises SettingsError."""
    left = memory.cache_bytes(settings.gpu_memory_utilization) - slots_bytes
    if left >= page_bytes:
        return left
    states = f", and {size_text(slots_bytes)} of states" if slots_bytes else ""
    what = f"{size_text(left)} are left" if left >= 0 else f"{size_text(-left)} are missing"
    raise SettingsError(
        f"gpu_memory_utilization {settings.gpu_memory_utilization:g} leaves no room for a page of "
        f"the KV cache ({settings.page_size} tokens, {size_text(page_bytes)}): {what} beside "
        f"{memory_text(memory)}{states}; raise it, or lower max_num_batched_tokens "
        "or max_num_seqs"
    )


def context_buckets(native_len: int, max_len: int) -> tuple[int, ...]:
    """Return bucket bounds at fractions and multiples of the native length.

    The fractions keep ordinary traffic from falling into one bucket.
    """
    doublings = max(0, math.ceil(math.log2(max_len / native_len)))
    lowest = max(-7, doublings - MAX_CONTEXT_BUCKETS + 2)
    bounds = [int(native_len * 2**power) for power in range(min(lowest, 0), doublings + 1)]
    return tuple(bound for bound in bounds if bound >= 16)[-(MAX_CONTEXT_BUCKETS - 1) :]
