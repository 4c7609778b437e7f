"""The least and the most memory of a lower store, known from the size of a page.

Planning imports this module, so a store that is too small is refused before weights are read.
"""

from typing import Protocol

from ropewalk.model_runtime.engine.kv_disk.files.janitor import SMALLEST_CAP
from ropewalk.model_runtime.engine.kv_disk.files.page_file import HEADER_BYTES
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.size_text import size_text


class _Sized(Protocol):
    """The sizes of a lower store."""

    @property
    def kv_disk_gib(self) -> float | None: ...

    @property
    def kv_offload_gib(self) -> float | None: ...


def refuse_sizes(sizes: _Sized, page_bytes: int, host: MachineMemory) -> None:
    """Raise ModelError if a folder is too small, or host memory is too small or not there.

    `page_bytes`: of a page of the cache. `host`: the memory of the machine.
    """
    if sizes.kv_disk_gib is not None:
        file_bytes = HEADER_BYTES + page_bytes
        least_gib = SMALLEST_CAP * file_bytes / 2**30
        if sizes.kv_disk_gib < least_gib:
            raise ModelError(
                f"kv_disk_gib must be >= {least_gib:.3g}, for {SMALLEST_CAP} pages of "
                f"{size_text(file_bytes)}, got {sizes.kv_disk_gib:g}"
            )
    gib = sizes.kv_offload_gib
    if gib is None:
        return
    if gib * 2**30 < page_bytes:
        raise ModelError(
            f"kv_offload_gib must be >= {page_bytes / 2**30:.3g}, for one page of "
            f"{size_text(page_bytes)}, got {gib:g}"
        )
    shortage = host.shortage(int(gib * 2**30), f"pages in host memory (kv_offload_gib {gib:g})")
    if shortage is not None:
        raise ModelError(shortage)
