"""The size of a cache: limits, memory of the machine, and the uses of a device's memory."""

from dataclasses import dataclass, replace

import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.memory.machine_memory import machine_memory

_CPU_SHARE = 0.25  # of the free memory
_STEP_SHARE = 0.1  # estimate: of the GPU memory beside the weights, for a step's tensors


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The uses of a device's memory, in bytes."""

    total_bytes: int
    outside_bytes: int  # see Reading.outside in memory_profile.py; measured after the step
    weight_bytes: int  # tensors allocated before the step
    step_bytes: int  # peak of the step's tensors, without the weights
    graph_bytes: int  # estimate for captured decode steps; 0 if none are captured

    def cache_bytes(self, utilization: float) -> int:
        """Return the bytes left for the cache within `utilization` of the device; may be < 0."""
        taken = self.outside_bytes + self.weight_bytes + self.step_bytes + self.graph_bytes
        return int(self.total_bytes * utilization) - taken


def sized(
    config: EngineConfig,
    token_bytes: int,
    affordable_bytes: int,
    kv_cache_gib: float | None = None,
    sequence_pages: int | None = None,
) -> EngineConfig:
    """Return `config` with kv_cache_tokens from a size in GiB, or from `affordable_bytes`.

    Without a size, the cache is at most max_num_seqs times `sequence_pages`, the most pages that a
    sequence holds; None: those of max_model_len.
    """
    if kv_cache_gib is not None:
        return replace(config, kv_cache_tokens=int(kv_cache_gib * 2**30) // token_bytes)
    if sequence_pages is None:
        sequence_pages = config.num_held_pages(config.max_model_len)
    num_pages = config.max_num_seqs * sequence_pages
    most = -(-num_pages // config.num_groups) * config.page_size
    return replace(config, kv_cache_tokens=min(most, affordable_bytes // token_bytes))


def gpu_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU, whoever uses it; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[1]


def affordable_bytes(
    device: torch.device,
    gpu_utilization: float,
    num_bytes_to_come: int = 0,
    planned_bytes: int | None = None,
) -> int:
    """Return the default memory of a cache: a fraction of the free memory, less what is to come.

    On a GPU it estimates the value that memory_profile.py measures after the weights are loaded.
    The memory in use and `num_bytes_to_come`, the weights not loaded yet, are subtracted from
    `gpu_utilization` of the device. The estimate is a fraction of the rest. `planned_bytes`: the
    memory of a GPU that need not be here, and has no other use.
    """
    if device.type == "cuda":
        free = total = planned_bytes or 0
        if planned_bytes is None:
            free, total = torch.cuda.mem_get_info(device)
        left = total * gpu_utilization - (total - free) - num_bytes_to_come
        return max(0, int(left * (1 - _STEP_SHARE)))
    return int(max(0, machine_memory().free - num_bytes_to_come) * _CPU_SHARE)
