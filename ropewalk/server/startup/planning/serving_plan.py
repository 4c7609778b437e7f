"""The serving plan: the size of the cache and the limits, from settings and facts about a model.

Planning needs no weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.quantised.page_format import EXACT, most_staged
from ropewalk.model_runtime.config import EngineConfig, lower_store_setting, with_slots
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.memory.cache_size import MemoryProfile, sized
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory
from ropewalk.model_runtime.page_groups import refuse_releases
from ropewalk.model_runtime.size_text import size_text
from ropewalk.rope import NativeRope, Profile
from ropewalk.server.settings.load import ServeSettings, SettingsError
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
    layout: CacheLayout  # of its cache, in which all layers keep all tokens
    windows: Mapping[int, int | None]  # keys that each layer reads
    affordable_bytes: int  # for the cache if the settings give no size
    host: MachineMemory
    gpu_bytes: int | None = None  # of the GPU's memory, also what others use; None: a CPU
    weight_bytes: int = 0  # that are not loaded yet, of all ranks
    # On a GPU, a more exact measurement, which runs a step of the loaded model.
    measure: Callable[[EngineConfig, Sequence[Profile]], MemoryProfile] | None = None

    @property
    def is_on_gpu(self) -> bool:
        return self.gpu_bytes is not None


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Deployments and engine limits that are consistent with each other."""

    deployments: tuple[Deployment, ...]
    config: EngineConfig
    layout: CacheLayout
    context_bounds: tuple[int, ...]  # of the metrics' context_bucket
    memory: MemoryProfile | None = None  # set if the cache size follows from it

    @property
    def rank_cache_bytes(self) -> int:
        return self.cache_bytes // self.layout.num_ranks

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the cache holds in whole pages."""
        return self.config.capacity

    @property
    def cache_parts(self) -> dict[str, int]:
        """Return the bytes of the cache by part, of those that there are."""
        return {name: size for name, size in part_bytes(self.layout, self.config).items() if size}

    @property
    def cache_bytes(self) -> int:
        return sum(self.cache_parts.values())


def part_bytes(layout: CacheLayout, config: EngineConfig) -> dict[str, int]:
    """Return the bytes of the cache by part; of tail and staged pages if pages are quantised."""
    step = config.max_num_batched_tokens, config.max_num_seqs, config.page_size
    return {
        "pages": config.capacity * layout.token_bytes,
        "open": config.max_num_seqs * layout.tail_bytes,
        "stage": most_staged(*step) * layout.stage_bytes,
        "states": config.num_state_slots * layout.slot_bytes,
    }


def plan_serving(settings: ServeSettings, facts: ModelFacts) -> ServingPlan:
    """Build the plan that follows from settings and model. Raises SettingsError or ModelError."""
    deployments, layout = plan_layout(settings, facts)
    config, memory = _config(settings, facts, deployments, layout)
    deployments = within_cache(settings, deployments, config)
    bounds = context_buckets(facts.native.native_len, config.max_model_len)
    return ServingPlan(deployments, config, layout, bounds, memory)


def plan_layout(
    settings: ServeSettings, facts: ModelFacts
) -> tuple[tuple[Deployment, ...], CacheLayout]:
    """Return the deployments, and the layout in which layers hold their window only, if they can.

    Raises SettingsError or ModelError for all that is refused whatever the size of the cache is.
    """
    _refuse_lower_store(settings, facts)
    deployments = plan_deployments(settings, facts.native)
    if settings.exact_batches and facts.is_on_gpu:
        _refuse_inexact(settings, facts, deployments)
    refuse_releases(profiles_of(deployments), facts.native.tables)
    longest = max(each.max_len for each in deployments)
    layout = facts.layout.with_windows(facts.windows, longest)
    if lower_store_setting(settings) is not None:
        from ropewalk.model_runtime.engine.kv_disk.least_sizes import (  # noqa: PLC0415  # rare
            refuse_sizes,
        )

        refuse_sizes(settings, layout.page_bytes, facts.host)
    return deployments, layout


def _refuse_inexact(
    settings: ServeSettings, facts: ModelFacts, deployments: Sequence[Deployment]
) -> None:
    """Raise SettingsError for what has no kernels with one order of sums on a GPU."""
    reads = "exact_batches on a GPU needs"
    if settings.kv_cache_dtype != EXACT:
        raise SettingsError(f"{reads} kv_cache_dtype {EXACT}, got {settings.kv_cache_dtype}")
    if settings.activations not in {"auto", "exact"}:
        raise SettingsError(f"{reads} activations exact, got {settings.activations}")
    if settings.tensor_parallel_size > 1:
        raise SettingsError(f"{reads} tensor_parallel_size 1, got {settings.tensor_parallel_size}")
    if facts.layout.states:
        raise SettingsError(
            f"{reads} a model whose layers all keep keys and values; this model has layers that "
            "keep a state"
        )
    methods = [profile.positions for profile in profiles_of(deployments)]
    named = next((each.described()["method"] for each in methods if each is not None), None)
    if named is not None:
        raise SettingsError(
            f"{reads} keys at their own positions, and a deployment serves the position method "
            f"{named} (rope_scaling or allowed_positions)"
        )
    if find_spec("triton") is None:
        raise SettingsError(f"{reads} the package triton, which is not installed")


def _refuse_lower_store(settings: ServeSettings, facts: ModelFacts) -> None:
    """Raise SettingsError if the model's cache can have no lower store."""
    name = lower_store_setting(settings)
    if name is None:
        return
    # The address of a store may hold a password.
    given = f", got {settings.kv_disk}" if name == "kv_disk" else ""
    if facts.is_on_gpu and settings.kv_offload_gib is None:
        raise SettingsError(
            f"{name} needs the model on a CPU, or kv_offload_gib beside it on a GPU{given}"
        )
    if not facts.is_on_gpu and settings.kv_offload_gib is not None:
        raise SettingsError(
            "kv_offload_gib is for a GPU: on a CPU the KV cache is host memory already, so raise "
            f"kv_cache_gib, got {settings.kv_offload_gib:g}"
        )
    if facts.layout.states:
        raise SettingsError(
            f"{name} is for models whose layers all keep keys and values; this model has layers "
            f"that keep a state, which is in no page{given}"
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
    layout: CacheLayout,
) -> tuple[EngineConfig, MemoryProfile | None]:
    target_s = settings.step_target_seconds
    default_s = _STEP_TARGET_ON_GPU_S if facts.is_on_gpu else _STEP_TARGET_S
    alike = {each.name for each in fields(EngineConfig)} & set(ServeSettings.model_fields)
    stated: dict[str, Any] = {each: getattr(settings, each) for each in alike}
    stated |= {
        **step_limits(settings, facts.gpu_bytes),
        "kv_cache_tokens": settings.kv_cache_tokens or 0,
        "max_model_len": max(each.max_len for each in deployments),
        "num_rope_tables": num_profiles(deployments),
        "step_target_s": default_s if target_s is None else target_s or None,
        "step_target_follows": target_s is None,
        "page_groups": layout.groups,
    }
    config = EngineConfig(**stated)
    memory = None
    size_gib = settings.kv_cache_gib
    if layout.states and facts.is_on_gpu:
        config = _without_drafts(config)
    config = with_slots(
        config, layout.slot_bytes, facts.affordable_bytes, settings.kv_cache_tokens, size_gib
    )
    parts = part_bytes(layout, config)
    beside_bytes = sum(parts.values()) - parts["pages"]
    affordable = max(0, facts.affordable_bytes - beside_bytes)
    if settings.kv_cache_tokens is None:
        if settings.kv_cache_gib is None and facts.measure is not None:
            memory = facts.measure(config, profiles_of(deployments))
            affordable = _left(settings, memory, layout, parts["states"])
        pages_gib = None if size_gib is None else max(0.0, size_gib - beside_bytes / 2**30)
        most_pages = most_pages_held(deployments, config)
        config = sized(config, layout.token_bytes, affordable, pages_gib, most_pages)
    _refuse_shortage(settings, facts, config.capacity * layout.token_bytes + beside_bytes)
    if config.capacity == 0:
        given = "kv_cache_tokens" if settings.kv_cache_tokens is not None else "kv_cache_gib"
        size = getattr(settings, given)
        states = parts["states"]
        raise SettingsError(
            f"{given}: must have at least one page of {config.page_size} tokens (page_size)"
            + (f" beside {size_text(states)} of states" if states else "")
            + _beside(config, parts)
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


def _beside(config: EngineConfig, parts: Mapping[str, int]) -> str:
    """Return a clause with the exact pages of all sequences; empty if no page is quantised."""
    if not parts["open"]:
        return ""
    return (
        f" beside {size_text(parts['open'])} of tail pages for {config.max_num_seqs} sequences "
        f"(max_num_seqs) and {size_text(parts['stage'])} of a step (max_num_batched_tokens)"
    )


def _refuse_shortage(settings: ServeSettings, facts: ModelFacts, cache_bytes: int) -> None:
    """Raise SettingsError if the machine has no room for the cache and the weights to come."""
    if facts.is_on_gpu:
        return
    what = "weights and KV cache" if facts.weight_bytes else "the pages of the KV cache"
    shortage = facts.host.shortage(cache_bytes + facts.weight_bytes, what)
    if shortage is None:
        return
    stated = ("kv_cache_gib", "kv_cache_tokens")
    given = next((name for name in stated if getattr(settings, name) is not None), None)
    raise SettingsError(shortage if given is None else f"{given}: {shortage}")


def _left(
    settings: ServeSettings, memory: MemoryProfile, layout: CacheLayout, states_bytes: int
) -> int:
    """Return the bytes of all ranks left for pages, at least for one. Raises SettingsError."""
    left = memory.cache_bytes(settings.gpu_memory_utilization) - states_bytes
    page_bytes = layout.page_size * layout.token_bytes // layout.num_ranks
    if left >= page_bytes:
        return left * layout.num_ranks
    states = f", and {size_text(states_bytes)} of states" if states_bytes else ""
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
