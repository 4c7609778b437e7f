"""A checked checkpoint and its limits -> an engine, with its cache sized and allocated."""

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

_CPU_SHARE = 0.25  # of the memory there is
_STEP_SHARE = 0.1  # a guess: of what weights leave on a GPU, what a step's tensors take
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    observer: Observer | None = None,
    profiles: Iterable[Profile] = (),
    make: type[ModelRunner] = ModelRunner,
) -> Engine:
    """Allocate the cache and wire the parts together; the caller starts it.

    Rotation tables of `profiles` are made now, others when a request first needs them.
    `make`: another kind of model runner, for comparisons. Raises ModelError.
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
        torch.cuda.empty_cache()  # of what ran before it was recorded, on a stream of its own
    return Engine(runner, checkpoint.tokenizer, config, checkpoint.eos_token_ids, observer)


def build_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    profiles: Iterable[Profile] = (),
    make: type[ModelRunner] = ModelRunner,
) -> ModelRunner:
    """The engine's model runner over a cache of its own. Raises ModelError for no memory.

    `make`: another kind, for comparisons.
    """
    page_size = config.page_size
    try:
        # One page more for what pads a recorded step.
        num_pages = config.num_pages + (1 if captures_graphs(checkpoint, config) else 0)
        store = new_store(
            checkpoint.plans, num_pages, page_size, checkpoint.dtype, checkpoint.device
        )
    except RuntimeError as error:  # torch's word for no memory, on a CPU and on a GPU
        raise ModelError(
            f"there is no memory for a KV cache of {config.kv_cache_tokens} tokens: {error}"
        ) from error
    tables = RopeTables(checkpoint.native, page_size, config.max_model_len, checkpoint.device)
    for profile in profiles:
        tables.slot(profile)
    return make(checkpoint.model, checkpoint.plans, store, tables, page_size)


def captures_graphs(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    """Whether the engine's decode steps are recorded (cuda_graphs.py)."""
    return backend_for(checkpoint.device).can_capture and not config.enforce_eager


def sized(
    config: EngineConfig, token_bytes: int, affordable_bytes: int, kv_cache_gib: float | None = None
) -> EngineConfig:
    """`config` with kv_cache_tokens from a size in GiB, or from the memory that may be taken.

    Without a size the cache never exceeds what max_num_seqs sequences of max_model_len need.
    """
    if kv_cache_gib is not None:
        return replace(config, kv_cache_tokens=int(kv_cache_gib * 2**30) // token_bytes)
    most = config.max_num_seqs * -(-config.max_model_len // config.page_size) * config.page_size
    return replace(config, kv_cache_tokens=min(most, affordable_bytes // token_bytes))


def affordable_bytes(
    device: torch.device, gpu_utilization: float, num_bytes_to_come: int = 0
) -> int:
    """Memory that a cache may take when nothing is said: a share of what there is.

    On a GPU an estimate of what memory_profile.py measures once weights are loaded: a share of
    what `gpu_utilization` of the device holds beside what is taken already and
    `num_bytes_to_come`, the weights that are not loaded yet.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        left = total * gpu_utilization - (total - free) - num_bytes_to_come
        return max(0, int(left * (1 - _STEP_SHARE)))
    return int(total_memory() * _CPU_SHARE)


def total_memory() -> int:
    """Bytes of the machine, or of the container where that has fewer."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.is_file():
        limit = _CGROUP_LIMIT.read_text().strip()
        total = min(total, int(limit)) if limit.isdigit() else total
    return total
