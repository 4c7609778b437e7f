"""The progress of a download: one bar on a terminal, else a line of the log every few seconds."""

import sys
import threading
import time
from typing import Any, Self

import structlog
from huggingface_hub import constants
from tqdm.auto import tqdm

from ropewalk.model_runtime.loading.hub.wanted import OnBytes

_INTERVAL_S = 5.0  # between two lines

_log = structlog.get_logger(__name__)


class DownloadProgress:
    """Bytes of all files together, reported to a caller and to standard error."""

    def __init__(self, model_id: str, num_bytes: int, on_bytes: OnBytes) -> None:
        """Begin at 0 of `num_bytes`; nothing is reported if they are 0."""
        self._model_id = model_id
        self._total = num_bytes
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}  # bytes by bar
        self._said_s = time.monotonic()
        self._bar: Any = None
        if num_bytes and sys.stderr.isatty() and not constants.HF_HUB_DISABLE_PROGRESS_BARS:
            self._bar = tqdm(
                total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc=model_id
            )
        if num_bytes:
            on_bytes(0, num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # equal files are fetched once, so the count may be short of the total
            self.count(id(self), self._total)
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            elif self._total:
                self._say(self._done())

    def bars(self) -> type[Any]:
        """Return a class for huggingface_hub's `tqdm_class`, whose objects draw nothing.

        The library makes several of them: bytes from the network, bytes on the disk (which differ
        if it deduplicates), and files. The largest count of bytes is the progress.
        """
        progress = self

        class Counter(tqdm):  # type: ignore[misc]  # tqdm has no types
            """A disabled bar that passes its count of bytes on."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                self._is_of_bytes = named.get("unit") == "B"
                super().__init__(*arguments, **{**named, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                """Count `n` more; negative if a file begins again."""
                self.n += n or 0
                if self._is_of_bytes:
                    progress.count(id(self), int(self.n))
                return None

        return Counter

    def count(self, bar: int, num_bytes: int) -> None:
        """Set the count of one of the library's bars."""
        if not self._total:
            return
        with self._lock:
            self._counts[bar] = num_bytes
            done = self._done()
            self._on_bytes(done, self._total)
            if self._bar is not None:
                self._bar.update(done - self._bar.n)
            elif time.monotonic() - self._said_s >= _INTERVAL_S:
                self._say(done)

    def _done(self) -> int:
        return min(self._total, max(self._counts.values(), default=0))

    def _say(self, done: int) -> None:
        self._said_s = time.monotonic()
        _log.info(
            "download_progress",
            model=self._model_id,
            bytes_done=done,
            bytes_total=self._total,
            percent=100 * done // self._total,
        )
