"""Build an engine with an allocated cache from a checked checkpoint and its limits."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from model_runtime.attention.backends import backend_for, new_store
from model_runtime.cache.rope_tables import RopeTables
from model_runtime.config import EngineConfig
from model_runtime.engine.engine import Engine
from model_runtime.engine.observer import Observer
from model_runtime.errors import ModelError
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.loading.load_faults import faults_of
from model_runtime.runner.cuda_graphs import cuda_recorder
from model_runtime.runner.model_runner import ModelRunner
from rope import Profile

_CPU_SHARE = 0.25  # of the total memory
_STEP_SHARE = 0.1  # estimate: of the GPU memory beside the weights, for a step's tensors
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    observer: Observer | None = None,
    profiles: Iterable[Profile] = (),
    make: type[ModelRunner] = ModelRunner,
) -> Engine:
    """Allocate the cache and build the engine; the caller starts it.

    Rotation tables of `profiles` are built now, others when a request first needs them.
    `make`: another class of model runner, for comparisons. Raises ModelError.
    """
    with faults_of(type(checkpoint.model).__name__, checkpoint.dtype, checkpoint.device):
        return _built(checkpoint, config, observer, profiles, make)


def _built(
    checkpoint: Checkpoint,
    config: EngineConfig,
    observer: Observer | None,
    profiles: Iterable[Profile],
    make: type[ModelRunner],
) -> Engine:
    runner = build_runner(checkpoint, config, profiles, make)
    if captures_graphs(checkpoint, config):
        runner.capture_graphs(
            config.max_model_len,
            config.max_num_seqs,
            config.num_pages,
            cuda_recorder(checkpoint.device),
        )
        torch.cuda.empty_cache()  # memory of the warm-up runs on the capture stream
    return Engine(runner, checkpoint.tokenizer, config, checkpoint.eos_token_ids, observer)


def build_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    profiles: Iterable[Profile] = (),
    make: type[ModelRunner] = ModelRunner,
) -> ModelRunner:
    """Build the engine's model runner over a new cache. Raises ModelError if memory is short.

    `make`: another class of model runner, for comparisons.
    """
    page_size = config.page_size
    try:
        # One extra page for the padding of a captured step.
        num_pages = config.num_pages + (1 if captures_graphs(checkpoint, config) else 0)
        store = new_store(
            checkpoint.plans, num_pages, page_size, checkpoint.dtype, checkpoint.device
        )
    except RuntimeError as error:  # raised by torch if memory is short, on a CPU and on a GPU
        raise ModelError(
            f"there is no memory for a KV cache of {config.kv_cache_tokens} tokens: {error}"
        ) from error
    tables = RopeTables(checkpoint.native, page_size, config.max_model_len, checkpoint.device)
    for profile in profiles:
        tables.id_of(profile)
    return make(checkpoint.model, checkpoint.plans, store, tables, page_size)


def captures_graphs(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    """Return whether the engine captures its decode steps as CUDA graphs (cuda_graphs.py)."""
    return backend_for(checkpoint.device).can_capture and not config.enforce_eager


def sized(
    config: EngineConfig, token_bytes: int, affordable_bytes: int, kv_cache_gib: float | None = None
) -> EngineConfig:
    """Return `config` with kv_cache_tokens from a size in GiB, or from `affordable_bytes`.

    Without a size, the cache is at most max_num_seqs sequences of max_model_len.
    """
    if kv_cache_gib is not None:
        return replace(config, kv_cache_tokens=int(kv_cache_gib * 2**30) // token_bytes)
    most = config.max_num_seqs * -(-config.max_model_len // config.page_size) * config.page_size
    return replace(config, kv_cache_tokens=min(most, affordable_bytes // token_bytes))


def affordable_bytes(
    device: torch.device, gpu_utilization: float, num_bytes_to_come: int = 0
) -> int:
    """Return the default memory of a cache, a fraction of the memory of the machine.

    On a GPU it estimates the value that memory_profile.py measures after the weights are loaded.
    The memory in use and `num_bytes_to_come`, the weights not loaded yet, are subtracted from
    `gpu_utilization` of the device. The estimate is a fraction of the rest.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        left = total * gpu_utilization - (total - free) - num_bytes_to_come
        return max(0, int(left * (1 - _STEP_SHARE)))
    return int(total_memory() * _CPU_SHARE)


def total_memory() -> int:
    """Return the memory of the machine in bytes, or of the container if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.is_file():
        limit = _CGROUP_LIMIT.read_text().strip()
        total = min(total, int(limit)) if limit.isdigit() else total
    return total
