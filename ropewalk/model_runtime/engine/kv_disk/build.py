"""Build the lower store of an engine from its checkpoint, limits and cache."""

import secrets
from collections.abc import Callable
from dataclasses import replace

import torch

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.quantised.page_format import EXACT, FORMATS
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, PageCopies, PageMemory
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.files.folder import (
    FolderError,
    FolderStore,
    check_folder,
)
from ropewalk.model_runtime.engine.kv_disk.files.page_file import VERSION, PageFormat
from ropewalk.model_runtime.engine.kv_disk.finite import (
    IsFinite,
    Records,
    plain_check,
    quantised_check,
)
from ropewalk.model_runtime.engine.kv_disk.identity import (
    WeightFiles,
    arithmetic_facts,
    dtype_name,
    hashes_folder,
    identity_of,
    model_facts,
)
from ropewalk.model_runtime.engine.kv_disk.least_sizes import refuse_sizes
from ropewalk.model_runtime.engine.kv_disk.lower_store import READ_BYTES, WRITE_BYTES, LowerStore
from ropewalk.model_runtime.engine.kv_disk.page_store import PageStore
from ropewalk.model_runtime.engine.kv_disk.reader import Reader
from ropewalk.model_runtime.engine.kv_disk.stores.store_url import NEEDS_CLIENT, parse_store_url
from ropewalk.model_runtime.engine.kv_disk.writer import Writer
from ropewalk.model_runtime.engine.memory.machine_memory import machine_memory
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.page_groups import ONE_GROUP

_LEAST_BUFFERS = 4


def build_lower_store(checkpoint: Checkpoint, config: EngineConfig, store: KVCache) -> LowerStore:
    """Return the lower store of the cache `store`; it opens its folder when it starts.

    Raises ModelError if the cache cannot have one.
    """
    name = config.lower_store_setting
    memory = _copies(checkpoint.device, config, store)
    if checkpoint.states:
        raise ModelError(
            f"{name} serves models whose layers all keep keys and values, and this one has "
            "layers that keep a state, which is not in the pages of a prefix"
        )
    refuse_sizes(config, memory.num_bytes, machine_memory())
    form = _unnamed(store, memory.num_bytes)
    counting = Counting()
    place, open_store = _opening(checkpoint, config, form, counting)
    below = None
    if config.kv_offload_gib is not None:
        below = Pause("reads")
        opening = place, open_store
        place, open_store = _offloaded(config.kv_offload_gib, form, counting, opening, below)
    assert open_store is not None
    to_write, to_read = (_buffers(memory, most) for most in (WRITE_BYTES, READ_BYTES))
    writer = Writer(place, open_store, _check_of(store.layout), to_write, counting)
    reader = Reader(to_read, counting, lambda key: writer.delete([key]), below)
    return LowerStore(memory, writer, reader, counting, _used_bytes(store.layout, memory.num_bytes))


# The name of a place, and how it is opened; None: there is none.
_Opening = tuple[str, Callable[[], PageStore] | None]


def _copies(device: torch.device, config: EngineConfig, store: KVCache) -> PageCopies:
    """Return how pages are copied from and to the cache. Raises ModelError."""
    if device.type == "cpu":
        if config.kv_offload_gib is not None:
            raise ModelError(
                "kv_offload_gib is for a GPU: on a CPU the KV cache is host memory already, so "
                "raise kv_cache_gib"
            )
        return PageMemory(store.page_memory())
    if device.type != "cuda" or config.kv_offload_gib is None:
        raise ModelError(
            f"{config.lower_store_setting} needs the model on a CPU, or on a GPU of CUDA with "
            f"kv_offload_gib beside it, and it is on {device}"
        )
    from ropewalk.model_runtime.engine.kv_disk.offload.device_pages import (  # noqa: PLC0415  # rare
        DevicePages,
        SideStream,
    )

    try:
        return DevicePages(store.page_bytes(), SideStream(device))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"kv_offload_gib needs the memory of two pages on {device}, and it is not free: {error}"
        ) from error


def _used_bytes(layout: CacheLayout, num_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each group's layers in a page, which come before places without one."""
    num_places = len(layout.page_layers)
    return tuple(num_bytes * len(each) // num_places for each in layout.layers_of_groups)


def _opening(
    checkpoint: Checkpoint, config: EngineConfig, form: PageFormat, counting: Counting
) -> _Opening:
    """Return the folder of kv_disk or the store of kv_store, if there is one. Raises ModelError."""
    if config.kv_disk is None and config.kv_store is None:
        return "host memory", None
    if checkpoint.source is None or not checkpoint.versions:
        name = config.lower_store_setting
        raise ModelError(f"{name} needs the files of the weights, and the model has none")
    files = WeightFiles(checkpoint.source, checkpoint.versions)

    def make_format() -> PageFormat:
        facts = {
            "version": VERSION,
            **model_facts(checkpoint, config),
            **_layout(config),
            **arithmetic_facts(checkpoint, config),
        }
        content = files.content(known_in=hashes_folder(config))
        return replace(form, identity=identity_of({**facts, "weights": content}))

    if config.kv_store is not None:
        return _networked(config.kv_store, make_format)
    return _folder(config, make_format, counting)


def _offloaded(
    gib: float, form: PageFormat, counting: Counting, below: _Opening, pause: Pause
) -> _Opening:
    """Return host memory before a place."""
    from ropewalk.model_runtime.engine.kv_disk.offload.host_memory import (  # noqa: PLC0415  # rare
        HostMemory,
    )

    most_bytes = int(gib * 2**30)
    place, open_below = below

    def open_store() -> PageStore:
        if open_below is None:  # its pages end with the process, so any identity will do
            own = replace(form, identity=secrets.token_bytes(32))
            return HostMemory(own, most_bytes, counting, None, pause)
        store = open_below()
        return HostMemory(store.form, most_bytes, counting, store, pause)

    return place, open_store


def _layout(config: EngineConfig) -> dict[str, object]:
    """Return which layers a page holds, if it does not hold all."""
    groups = config.page_groups
    return {} if groups == ONE_GROUP else {"groups": groups.layers}


def _folder(
    config: EngineConfig, make_format: Callable[[], PageFormat], counting: Counting
) -> _Opening:
    """Return the folder of kv_disk. Raises ModelError if it cannot be used."""
    path, gib = config.kv_disk, config.kv_disk_gib
    assert path is not None
    assert gib is not None
    try:
        check_folder(path, create=True)
    except FolderError as error:
        raise ModelError(f"kv_disk {error}") from error
    return str(path), lambda: FolderStore(path, make_format(), int(gib * 2**30), counting)


def _networked(text: str, make_format: Callable[[], PageFormat]) -> _Opening:
    """Return the store of kv_store; nothing connects yet. Raises ModelError without its client."""
    try:
        from ropewalk.model_runtime.engine.kv_disk.stores.valkey_store import (  # noqa: PLC0415  # an extra
            ValkeyStore,
        )
    except ImportError as error:
        raise ModelError(f"kv_store {NEEDS_CLIENT}") from error
    url = parse_store_url(text)
    return url.shown, lambda: ValkeyStore(url, make_format())


def _check_of(layout: CacheLayout) -> IsFinite:
    """Return the check that a page's numbers are finite."""
    if not layout.quantises:
        return plain_check(dtype_name(layout.number_type))
    quantised, page_size = FORMATS[layout.format], layout.page_size
    return quantised_check(
        [
            Records(
                each.num_key_heads,
                quantised.record_bytes(each, page_size),
                *quantised.parameter_bytes(each, page_size),
            )
            for each in (layout.layers[index] for index in layout.page_layers)
        ]
    )


def _buffers(memory: PageCopies, most_bytes: int) -> Buffers:
    most = max(_LEAST_BUFFERS, most_bytes // memory.num_bytes)
    return Buffers(memory.num_bytes, most, memory.new_buffer)


def _unnamed(store: KVCache, num_bytes: int) -> PageFormat:
    """Return the format of the pages without their identity."""
    layout = store.layout
    return PageFormat(
        bytes(32),
        layout.page_size,
        len(layout.page_layers),
        dtype_name(layout.dtype) if layout.format == EXACT else layout.format,
        store.row_keys,
        num_bytes,
    )
