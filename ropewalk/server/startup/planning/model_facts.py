"""The facts about a model that planning needs: read before its weights, or of a loaded one.

On a GPU those of a loaded model include a function that measures the memory of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ropewalk.model_runtime.attention.sealed.page_format import (
    check_format,
    open_bytes,
    refuse_sealed_on,
    rounds,
    seals,
    stage_page_bytes,
    token_bytes,
)
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
from ropewalk.model_runtime.page_groups import LayerShape
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.state_shape import StateShape, bytes_per_state
from ropewalk.rope import NativeRope, Profile
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.planning.serving_plan import ModelFacts


@dataclass(frozen=True, slots=True)
class _Read:
    """The part of a model, loaded or not, that its cache follows from."""

    native: NativeRope
    shapes: Mapping[int, LayerShape]  # of keys and values
    windows: Mapping[int, int | None]  # keys that each layer reads
    states: Mapping[int, StateShape]
    dtype: torch.dtype
    device: torch.device


def facts_ahead(
    outline: ModelConfig, settings: ServeSettings, rank_bytes: int, host: MachineMemory
) -> ModelFacts:
    """Return the facts about a model with `rank_bytes` of weights to come in each process.

    `host`: the memory of the machine. Raises ModelError if the model has no pages in the format of
    its cache.
    """
    check_format(settings.kv_cache_dtype, outline.layers(), outline.dtype)
    if seals(settings.kv_cache_dtype):
        refuse_sealed_on(outline.device, settings.kv_cache_dtype)
    layers = outline.layers(), outline.windows(), outline.states()
    read = _Read(outline.native(), *layers, outline.dtype, outline.device)
    found = _facts(settings, read, host, rank_bytes)
    return replace(found, host=host)


def facts_of(
    checkpoint: Checkpoint,
    settings: ServeSettings,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelFacts:
    """Return the facts about a loaded model on its device; `make`: the class of its runner."""
    # `eval` holds a model in one process, whatever a variable of the environment says.
    if make is ModelRunner:
        settings = settings.model_copy(update={"tensor_parallel_size": 1})
    layers = checkpoint.plans, checkpoint.windows, checkpoint.states
    read = _Read(checkpoint.native, *layers, checkpoint.dtype, checkpoint.device)
    found = _facts(settings, read, machine_memory())
    # The plans are those of one rank's heads.
    found = replace(found, token_bytes=found.token_bytes * found.num_ranks)
    if checkpoint.device.type != "cuda":
        return found

    def measure(config: EngineConfig, profiles: Sequence[Profile]) -> MemoryProfile:
        meter, share = CudaMeter(checkpoint.device), settings.gpu_memory_utilization
        return profile_memory(checkpoint, config, profiles, share, meter, make=make)

    return replace(found, measure=measure)


def _facts(
    settings: ServeSettings,
    read: _Read,
    host: MachineMemory,
    rank_bytes: int = 0,
) -> ModelFacts:
    """Return the facts about layers of a number type on a device, with weights to come."""
    num_ranks, is_on_cpu = settings.tensor_parallel_size, read.device.type != "cuda"
    # On a CPU the ranks share the memory; GPUs have their own.
    to_come = rank_bytes * num_ranks if is_on_cpu else rank_bytes
    affordable = affordable_bytes(read.device, settings.gpu_memory_utilization, to_come)
    form = (read.shapes, read.dtype, settings.kv_cache_dtype, settings.page_size)
    return ModelFacts(
        read.native,
        token_bytes(*form),
        affordable if is_on_cpu else affordable * num_ranks,
        num_ranks=num_ranks,
        memory=host if is_on_cpu else None,
        gpu_bytes=gpu_bytes(read.device),
        weight_bytes=to_come,
        slot_bytes=bytes_per_state(read.states),
        drafts_states=is_on_cpu,
        open_bytes=open_bytes(*form),
        stage_page_bytes=stage_page_bytes(*form),
        rounds=rounds(read.dtype, settings.kv_cache_dtype),
        windows=read.windows,
        shapes=read.shapes,
    )
