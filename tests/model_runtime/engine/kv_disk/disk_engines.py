"""Engines with pages on disk, for its tests."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts
from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderStore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.files.file_versions import file_versions
from ropewalk.model_runtime.request import Output, Request
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import EngineFactory, Result
from tests.doubles.waiting import wait_until

PROMPT = [
    (7 * at * at + 3) % VOCAB_SIZE for at in range(200)
]  # twelve pages of 16 that can be reused
NUM_PAGES = 12


class Disk(Observer):
    """An observer that adds up what the lower store reports."""

    def __init__(self) -> None:
        self.sum = StoreCounts()
        self.gauges = (0, 0, 0)  # running, waiting, pages in use, of the last step
        self.num_steps = 0

    def stepped(
        self, num_running: int, num_waiting: int, num_waiting_tokens: int, num_used_pages: int
    ) -> None:
        """Keep the gauges."""
        self.gauges = num_running, num_waiting, num_used_pages
        self.num_steps += 1

    def pages_stored(self, counts: StoreCounts) -> None:
        """Add a report."""
        self.sum.pages += counts.pages
        self.sum.bad_files += counts.bad_files
        self.sum.memory += counts.memory
        self.sum.num_memory_bytes = counts.num_memory_bytes
        self.sum.num_tokens_read += counts.num_tokens_read
        self.sum.is_paused = counts.is_paused


def with_weights(checkpoint: Checkpoint, folder: Path, content: bytes = b"weights") -> Checkpoint:
    """The checkpoint as if it came from a folder with such a file of weights."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return replace(checkpoint, source=folder, versions=file_versions(folder))


class Server:
    """An engine over a folder or a store; it can be stopped, as a server that ends."""

    def __init__(
        self,
        engines: EngineFactory,
        checkpoint: Checkpoint,
        place: Path | str | None,
        **config: Any,
    ) -> None:
        """`place` is a folder, or the address of a store; None: there is neither."""
        self.disk = Disk()
        limits = dict(config)
        if isinstance(place, str):
            limits["kv_store"] = place
        elif place is not None:
            limits = {"kv_disk": place, "kv_disk_gib": 1.0, **config}
        self.engine: Engine = engines.over(checkpoint, observer=self.disk, **limits)
        lower = self.engine._core._lower_store
        assert lower is not None
        self.lower = lower
        wait_until(lambda: lower._writer.store is not None or lower._writer.is_off)

    def ask(self, request: Request) -> tuple[Result, int]:
        """Serve a request; return its result, and the prompt tokens that it found."""
        outputs = self.engine.generate([request])[0]
        return Result.of(outputs), outputs[-1].num_cached_tokens

    def submit(self, request: Request) -> "Waiting":
        """Queue a request without waiting for it."""
        return Waiting(self.engine, request)

    def stop(self) -> None:
        """Stop the engine, which writes what it has noted."""
        self.engine.stop()

    @property
    def pages(self) -> dict[str, int]:
        """The pages by event, of an engine that has stopped."""
        return dict(self.disk.sum.pages)


class Waiting:
    """The outputs of a request so far."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.outputs: list[Output] = []
        self._ended = threading.Event()
        engine.submit(request, self._collect)

    def _collect(self, output: Output) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self._ended.set()

    def result(self) -> tuple[Result, int]:
        """Wait for the end; return the result, and the prompt tokens found."""
        assert self._ended.wait(60)
        return Result.of(self.outputs), self.outputs[-1].num_cached_tokens


def written(server: Server) -> None:
    """Wait until all that was noted has gone through the writer's queue."""
    wait_until(lambda: not server.lower._noted)
    server.lower._writer.delete([])
    wait_until(server.lower._writer._queue.empty)


class HeldReads:
    """Reads of files that hang until `go_on` is set: of all pages, or of one key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, key: bytes | None = None) -> None:
        self.go_on = threading.Event()
        self.began: list[bytes] = []
        read = FolderStore.get

        def held(folder: FolderStore, of: bytes, into: memoryview) -> bool:
            if key is None or of == key:
                self.began.append(of)
                self.go_on.wait(60)
            return read(folder, of, into)

        monkeypatch.setattr(FolderStore, "get", held)


def files(folder: Path) -> list[Path]:
    """All page files of a folder, those of a prefix's start first."""
    found = [path for path in folder.glob("v1/*/*/*") if len(path.name) == 64]
    return sorted(found, key=lambda path: -path.stat().st_mtime)


def flip(path: Path, at: int) -> None:
    """Change one bit of a byte."""
    content = np.fromfile(path, np.uint8)
    content[at] ^= 1
    content.tofile(path)
