"""Build the tier of an engine from its checkpoint, limits and cache."""

import os
from dataclasses import replace

from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, PageMemory
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.facts import arithmetic_facts, dtype_name, model_facts
from ropewalk.model_runtime.engine.kv_disk.folder import FolderError, open_root
from ropewalk.model_runtime.engine.kv_disk.identity import WeightFiles, identity_of
from ropewalk.model_runtime.engine.kv_disk.janitor import SMALLEST_CAP
from ropewalk.model_runtime.engine.kv_disk.page_file import VERSION, PageFormat
from ropewalk.model_runtime.engine.kv_disk.reader import Reader
from ropewalk.model_runtime.engine.kv_disk.tier import READ_BYTES, WRITE_BYTES, DiskTier
from ropewalk.model_runtime.engine.kv_disk.writer import Writer
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.size_text import size_text

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
        facts = {
            "version": VERSION,
            **model_facts(checkpoint, config.page_size),
            **arithmetic_facts(checkpoint),
        }
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
        dtype_name(checkpoint.dtype),
        store.row_keys,
        memory.num_bytes,
    )
