"""The facts about a model that planning needs: read before its weights, or of a loaded one.

On a GPU those of a loaded model include a function that measures the memory of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.quantised.page_format import refuse_format_on
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.memory.cache_size import (
    MemoryProfile,
    affordable_bytes,
    gpu_bytes,
)
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory, machine_memory
from ropewalk.model_runtime.engine.memory.memory_profile import CudaMeter, profile_memory
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import NativeRope, Profile
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.planning.serving_plan import ModelFacts


def facts_ahead(
    outline: ModelConfig,
    settings: ServeSettings,
    rank_bytes: int,
    host: MachineMemory,
    planned_bytes: int | None = None,
) -> ModelFacts:
    """Return the facts about a model with `rank_bytes` of weights to come in each process.

    `host`: the memory of the machine. `planned_bytes`: that of a GPU that need not be here. Raises
    ModelError if the model has no pages in the format of its cache.
    """
    form = settings.page_size, settings.kv_cache_dtype
    layout = outline.cache_layout(*form, settings.tensor_parallel_size)
    layout.check()
    refuse_format_on(outline.device, layout.format)
    read = outline.native(), layout, outline.windows()
    return _facts(settings, outline.device, read, host, rank_bytes, planned_bytes=planned_bytes)


def facts_of(
    checkpoint: Checkpoint,
    settings: ServeSettings,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelFacts:
    """Return the facts about a loaded model on its device; `make`: the class of its runner."""
    layout = checkpoint.cache_layout(settings.page_size, settings.kv_cache_dtype)
    # `eval` holds a model in one process, whatever a variable of the environment says.
    if make is not ModelRunner:
        layout = replace(layout, num_ranks=settings.tensor_parallel_size)
    device, read = checkpoint.device, (checkpoint.native, layout, checkpoint.windows)
    found = _facts(settings, device, read, machine_memory())
    if not found.is_on_gpu:
        return found

    def measure(config: EngineConfig, profiles: Sequence[Profile]) -> MemoryProfile:
        meter, share = CudaMeter(device), settings.gpu_memory_utilization
        return profile_memory(checkpoint, config, profiles, share, meter, make=make)

    return replace(found, measure=measure)


def _facts(
    settings: ServeSettings,
    device: torch.device,
    read: tuple[NativeRope, CacheLayout, Mapping[int, int | None]],
    host: MachineMemory,
    rank_bytes: int = 0,
    *,
    planned_bytes: int | None = None,
) -> ModelFacts:
    """Return the facts about a model on a device, with weights to come."""
    num_ranks = read[1].num_ranks
    total = gpu_bytes(device) if planned_bytes is None else planned_bytes
    # On a CPU the ranks share the memory; GPUs have their own.
    to_come = rank_bytes * num_ranks if total is None else rank_bytes
    share = settings.gpu_memory_utilization
    affordable = affordable_bytes(device, share, to_come, planned_bytes)
    if total is not None:
        affordable *= num_ranks
    return ModelFacts(*read, affordable, host, total, to_come)
