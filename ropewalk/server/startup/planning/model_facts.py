"""The facts about a loaded model that planning needs.

On a GPU they include a function that measures the memory of a step.
"""

from collections.abc import Callable, Sequence

from ropewalk.model_runtime.attention.sealed.page_format import (
    open_bytes,
    rounds,
    stage_page_bytes,
    token_bytes,
)
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.memory.cache_size import (
    MemoryProfile,
    affordable_bytes,
    gpu_bytes,
)
from ropewalk.model_runtime.engine.memory.machine_memory import machine_memory
from ropewalk.model_runtime.engine.memory.memory_profile import CudaMeter, profile_memory
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.state_shape import bytes_per_state
from ropewalk.rope import Profile
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.planning.serving_plan import ModelFacts


def facts_of(
    checkpoint: Checkpoint,
    settings: ServeSettings,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelFacts:
    """Return the facts about a loaded model on its device; `make`: the class of its runner."""
    # `eval` holds a model in one process, whatever a variable of the environment says.
    num_ranks = 1 if make is ModelRunner else settings.tensor_parallel_size
    # The plans are those of one rank's heads.
    form = (checkpoint.plans, checkpoint.dtype, settings.kv_cache_dtype, settings.page_size)
    num_token_bytes = token_bytes(*form) * num_ranks
    utilization = settings.gpu_memory_utilization
    affordable = affordable_bytes(checkpoint.device, utilization)
    windows = checkpoint.windows
    if checkpoint.device.type != "cuda":
        memory = machine_memory()
        return ModelFacts(
            checkpoint.native,
            num_token_bytes,
            affordable,
            num_ranks=num_ranks,
            memory=memory,
            slot_bytes=bytes_per_state(checkpoint.states),
            open_bytes=open_bytes(*form),
            stage_page_bytes=stage_page_bytes(*form),
            rounds=rounds(checkpoint.dtype, settings.kv_cache_dtype),
            windows=windows,
            shapes=checkpoint.plans,
        )

    def measure(config: EngineConfig, profiles: Sequence[Profile]) -> MemoryProfile:
        meter = CudaMeter(checkpoint.device)
        return profile_memory(checkpoint, config, profiles, utilization, meter, make=make)

    # Every rank has a GPU of its own.
    return ModelFacts(
        checkpoint.native,
        num_token_bytes,
        affordable * num_ranks,
        measure,
        num_ranks,
        gpu_bytes=gpu_bytes(checkpoint.device),
        slot_bytes=bytes_per_state(checkpoint.states),
        drafts_states=False,
        open_bytes=open_bytes(*form),
        stage_page_bytes=stage_page_bytes(*form),
        windows=windows,
        shapes=checkpoint.plans,
    )
