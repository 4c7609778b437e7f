"""Build the tier of an engine from its checkpoint, limits and cache."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, PageMemory
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.folder import FolderError, open_root
from ropewalk.model_runtime.engine.kv_disk.identity import WeightFiles, identity_of
from ropewalk.model_runtime.engine.kv_disk.janitor import SMALLEST_CAP
from ropewalk.model_runtime.engine.kv_disk.page_file import VERSION, PageFormat
from ropewalk.model_runtime.engine.kv_disk.reader import Reader
from ropewalk.model_runtime.engine.kv_disk.tier import READ_BYTES, WRITE_BYTES, DiskTier
from ropewalk.model_runtime.engine.kv_disk.writer import Writer
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.known_trials import fingerprint
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.backends import described, multiplies_pairs
from ropewalk.model_runtime.size_text import size_text

_ROOT = Path(__file__).parents[3]
# Beside attention, kernels and layers: how weights and angles are made.
_SOURCES = (_ROOT / "rope", *(_ROOT / "model_runtime" / each for each in ("formats", "loading")))
_LEAST_BUFFERS = 4


def build_tier(checkpoint: Checkpoint, config: EngineConfig, store: KVCache) -> DiskTier:
    """Return the tier over the cache `store`; it opens its folder when it starts.

    Raises ModelError if the cache cannot have one.
    """
    path, gib = config.kv_disk, config.kv_disk_gib
    assert path is not None
    assert gib is not None
    if checkpoint.device.type != "cpu":
        raise ModelError(f"kv_disk needs the model on a CPU, and it is on {checkpoint.device}")
    if checkpoint.states:
        raise ModelError(
            "kv_disk serves models whose layers all keep keys and values, and this one has "
            "layers that keep a state, which pages of a prefix do not hold"
        )
    if checkpoint.source is None or not checkpoint.versions:
        raise ModelError("kv_disk needs the files of the weights, and the model has none")
    try:
        os.close(open_root(path, create=True))
    except FolderError as error:
        raise ModelError(f"kv_disk {error}") from error
    memory = PageMemory(store.page_memory())
    form = _unnamed(checkpoint, config, store, memory)
    cap_bytes = int(gib * 2**30)
    least = SMALLEST_CAP * form.file_bytes
    if cap_bytes < least:
        raise ModelError(
            f"kv_disk_gib must be >= {least / 2**30:.3g}, for {SMALLEST_CAP} pages of "
            f"{size_text(form.file_bytes)}, got {gib:g}"
        )
    files = WeightFiles(checkpoint.source, checkpoint.versions)

    def make_format() -> PageFormat:
        facts = _facts(checkpoint, config, store)
        content = files.content(known_in=path)
        return replace(form, identity=identity_of({**facts, "weights": content}))

    counting = Counting()
    to_write, to_read = (_buffers(memory, most) for most in (WRITE_BYTES, READ_BYTES))
    writer = Writer(path, cap_bytes, make_format, to_write, counting)
    reader = Reader(to_read, counting, lambda key: writer.delete([key]))
    return DiskTier(memory, writer, reader, counting)


def _buffers(memory: PageMemory, most_bytes: int) -> Buffers:
    return Buffers(memory.num_bytes, max(_LEAST_BUFFERS, most_bytes // memory.num_bytes))


def _unnamed(
    checkpoint: Checkpoint, config: EngineConfig, store: KVCache, memory: PageMemory
) -> PageFormat:
    """Return the format of the pages without their identity."""
    return PageFormat(
        bytes(32),
        config.page_size,
        len(checkpoint.plans),
        _name(store.dtype),
        store.row_keys,
        memory.num_bytes,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _facts(checkpoint: Checkpoint, config: EngineConfig, store: KVCache) -> dict[str, object]:
    """Return what decides the bits of a page beside the weights' files, profile and tokens."""
    plans = checkpoint.plans
    return {
        "version": VERSION,
        "dtype": _name(checkpoint.dtype),
        "cache": _name(store.dtype),
        "page_size": config.page_size,
        "keys_by_token": store.row_keys,
        "layers": [
            [index, plans[index].num_key_heads, plans[index].key_dim, plans[index].value_dim]
            for index in sorted(plans)
        ],
        "architecture": type(checkpoint.model).__name__,
        "weights_held": None if checkpoint.low_bits is None else checkpoint.low_bits.formats,
        "products": checkpoint.products,
        "attention": described(checkpoint.device),
        # A trial by time decides this, so equal machines may differ.
        "pairs": multiplies_pairs(checkpoint.device, checkpoint.dtype),
        # Where the self-check found that a row's bits depend on the batch, threads may, too.
        "threads": None if checkpoint.report.bitwise else torch.get_num_threads(),
        "arithmetic": fingerprint(*_SOURCES),
    }
