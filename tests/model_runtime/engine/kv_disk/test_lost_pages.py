"""Pages that are dropped or deleted, and how long a pause is."""

import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from ropewalk.model_runtime.engine.kv_disk import build
from ropewalk.model_runtime.engine.kv_disk.counts import Pause
from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderStore
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.model_runtime.engine.kv_disk.disk_engines import (
    NUM_PAGES,
    PROMPT,
    Server,
    files,
    with_weights,
    written,
)


@pytest.fixture
def checkpoint(llama_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return with_weights(llama_checkpoint, tmp_path / "model")


def test_a_disk_slower_than_the_prompts_drops_what_is_evicted_first(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds one prompt, and the memory of the writer four pages."""
    go_on, write = threading.Event(), FolderStore.put

    def held(*arguments: Any) -> bool:
        go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(FolderStore, "put", held)
    monkeypatch.setattr(build, "WRITE_BYTES", 1)
    prompts = [[100 + number, *PROMPT[1:]] for number in range(3)]
    asks = [request(deployment_of(checkpoint), each, max_tokens=4) for each in prompts]
    expected = [answer(engines.over(checkpoint), each)[0] for each in asks]
    server = Server(engines, checkpoint, tmp_path / "kv", kv_cache_tokens=16 * 16)
    assert [server.ask(each)[0] for each in asks] == expected
    go_on.set()
    server.stop()
    assert server.pages["dropped"] >= 1
    assert server.pages["written"] >= 4
    assert server.pages["written"] + server.pages["dropped"] == 3 * NUM_PAGES


@pytest.mark.parametrize("age_s", [0, 61])
def test_pages_of_the_last_minute_are_deleted_with_the_prefix_cache(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, age_s: int
) -> None:
    """An answer with NaN clears it. Older pages stay."""
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    server.ask(request(deployment_of(checkpoint), PROMPT, max_tokens=4))
    written(server)
    assert len(files(folder)) == NUM_PAGES
    recent = server.lower._recent
    aged = [(at - age_s, key) for at, key in recent]
    core = server.engine._core

    def clear() -> None:
        recent.clear()
        recent.extend(aged)
        core.scheduler.pages.invalidate_prefix_cache(())

    server.engine._commands.put(clear)
    server.ask(request(deployment_of(checkpoint), [7, 8, 9], max_tokens=1))
    written(server)
    assert len(files(folder)) == (NUM_PAGES if age_s else 0)
    server.stop()


def test_a_pause_doubles_up_to_an_hour_and_is_short_again_after_a_success() -> None:
    """Each has one line in the log."""
    pause = Pause("writes")
    with structlog.testing.capture_logs() as logs:
        for _ in range(8):
            pause.begin("full")
            pause.begin("full")  # no effect during a pause
            pause._until = 0.0
        pause.ended_well()
        pause.begin("full")
    assert [each["seconds"] for each in logs] == [60, 120, 240, 480, 960, 1920, 3600, 3600, 60]
