"""A folder of pages that its servers keep within a size."""

from pathlib import Path

from ropewalk.model_runtime.engine.kv_disk.folder import PageFolder
from ropewalk.model_runtime.engine.kv_disk.janitor import allowance, sweep
from ropewalk.model_runtime.engine.kv_disk.page_file import PageFormat
from ropewalk.model_runtime.engine.kv_disk.page_store import Room


class FolderStore(PageFolder):
    """A folder of page files, and its janitor."""

    def __init__(self, path: Path, form: PageFormat, cap_bytes: int) -> None:
        """Open the folder. Raises FolderError or OSError."""
        super().__init__(path, form)
        self._cap_bytes = cap_bytes

    def look(self) -> Room | None:
        """Sweep. Returns None if another process does. Raises OSError."""
        swept = sweep(self.root, self._cap_bytes)
        if swept is None:
            return None
        free = self._cap_bytes - swept.num_bytes
        left = min(allowance(self._cap_bytes, self.form.file_bytes), free)
        return Room(left, swept.num_bytes, swept.num_evicted)
