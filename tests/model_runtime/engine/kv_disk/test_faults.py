"""No fault of the disk ends or delays a request, and each is counted."""

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from ropewalk.model_runtime.engine.kv_disk import lower_store, reader
from ropewalk.model_runtime.engine.kv_disk.files import folder as folder_module
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.waiting import wait_until
from tests.model_runtime.engine.kv_disk.disk_engines import (
    NUM_PAGES,
    PROMPT,
    HeldReads,
    Server,
    files,
    flip,
    with_weights,
)

PAYS = lower_store.LowerStore._pays


@pytest.fixture
def checkpoint(llama_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return with_weights(llama_checkpoint, tmp_path / "model")


def asked(checkpoint: Checkpoint, **options: Any) -> Any:
    """A request for a prompt of twelve pages."""
    return request(deployment_of(checkpoint), PROMPT, **{"max_tokens": 4, "logprobs": 2, **options})


def num_installed(server: Server) -> int:
    """The pages that reads have brought to the cache and still hold."""
    return sum((len(each.held) - each.num_before) for each in server.lower._fetches.values())


def truncated(path: Path) -> None:
    os.truncate(path, 900)


def flipped(path: Path) -> None:
    flip(path, 700)


def of_another_key(path: Path) -> None:
    """The page before it in its place."""
    shutil.copyfile(files(path.parents[3])[3], path)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (truncated, "truncated"),
        (flipped, "checksum"),
        (of_another_key, "foreign"),
    ],
)
def test_a_bad_file_is_a_miss_and_replaced(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    fault: Callable[[Path], None],
    reason: str,
) -> None:
    """The pages before it are read, and the rest is computed and written again."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    server.ask(asked(checkpoint))
    server.stop()
    path = files(folder)[4]
    whole = path.read_bytes()
    fault(path)
    server = Server(engines, checkpoint, folder)
    assert server.ask(asked(checkpoint)) == (expected, 4 * 16)
    server.stop()
    assert server.disk.sum.bad_files == {reason: 1}
    assert path.read_bytes() == whole
    server = Server(engines, checkpoint, folder)
    assert server.ask(asked(checkpoint)) == (expected, NUM_PAGES * 16)
    server.stop()


def test_an_error_that_says_nothing_about_a_page_leaves_its_file(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is computed, and a later read finds all pages."""
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    expected, _ = server.ask(asked(checkpoint))
    server.stop()

    def refused(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, files(folder)[0].open("rb") as first:
        patch.setattr(folder_module, "read_page", refused)
        server = Server(engines, checkpoint, folder)
        assert server.ask(asked(checkpoint)) == (expected, 0)
        server.stop()
        assert os.fstat(first.fileno()).st_nlink == 1  # it was not deleted and written again
    assert server.disk.sum.bad_files == {"unreadable": 1}
    server = Server(engines, checkpoint, folder)
    assert server.ask(asked(checkpoint)) == (expected, NUM_PAGES * 16)
    server.stop()


def pauses(logs: list[Any]) -> list[str]:
    """The reasons of the lines about pauses."""
    return [each["reason"] for each in logs if each["event"] == "kv_disk_paused"]


def test_a_disk_that_takes_no_page_pauses_the_writes_with_one_line(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is still read, and nothing half written stays."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    server.ask(asked(checkpoint))
    server.stop()
    for path in files(folder)[3:]:
        path.unlink()

    def refused(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_module, "write_page", refused)
    with structlog.testing.capture_logs() as logs:
        server = Server(engines, checkpoint, folder)
        assert server.ask(asked(checkpoint)) == (expected, 3 * 16)
        server.stop()
    assert pauses(logs) == [os.strerror(errno.ENOSPC)]
    assert server.disk.sum.is_paused
    assert server.pages["read"] == 3
    assert server.pages["dropped"] == NUM_PAGES - 3
    assert len(list(folder.glob("v1/*/*/*"))) == 3


def test_the_systems_limit_of_a_files_size_pauses_the_writes(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A fault that the system makes itself."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    server = Server(engines, checkpoint, tmp_path / "kv")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert server.ask(asked(checkpoint))[0] == expected
        server.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert server.pages == {"dropped": NUM_PAGES}
    assert not list((tmp_path / "kv").glob("v1/*/*/*"))


def test_a_removed_folder_pauses_and_is_used_again_when_it_is_back(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """It is not made again, because it may be a disk that is not mounted."""
    folder = tmp_path / "kv"
    with structlog.testing.capture_logs() as logs:
        server = Server(engines, checkpoint, folder)
        shutil.rmtree(folder, ignore_errors=True)  # while the janitor looks through it
        wait_until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists())
        first, _ = server.ask(asked(checkpoint))
        wait_until(lambda: not server.lower._noted)
        server.lower._writer.delete([])  # what comes before it in the queue is dropped
        wait_until(server.lower._writer._queue.empty)
        assert not folder.exists()
        folder.mkdir(mode=0o700)
        server.lower._writer.pause._until = 0.0
        longer = request(deployment_of(checkpoint), [*PROMPT, *PROMPT[:40]], max_tokens=1)
        server.ask(longer)
        server.stop()
    assert pauses(logs) == ["No such file or directory"]
    assert first == answer(engines.over(checkpoint), asked(checkpoint))[0]
    assert len(files(folder)) == 3  # the others were noted before


def test_a_read_that_hangs_delays_nobody_else_and_its_request_for_a_while(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request that waits is computed when its time is up."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    server.ask(asked(checkpoint))
    server.stop()
    held = HeldReads(monkeypatch)
    server = Server(engines, checkpoint, folder)
    waiting = server.submit(asked(checkpoint))
    wait_until(lambda: bool(held.began))
    short = request(deployment_of(checkpoint), [7, 8, 9], max_tokens=3)
    server.engine.generate([short])  # its prompt fills no page
    assert not waiting.outputs
    monkeypatch.setattr(reader, "_PAGE_S", 0.0)
    assert waiting.result() == (expected, 0)
    other = request(deployment_of(checkpoint), PROMPT[1:], max_tokens=1)
    server.ask(other)
    assert len(held.began) == 1  # no read is tried during the pause
    held.go_on.set()
    server.stop()
    assert server.disk.sum.bad_files == {"slow": 1}
    assert server.disk.sum.is_paused


def test_reads_that_hang_again_pause_for_longer_and_no_further_thread_hangs(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While every thread hangs, nothing waits. Reads go on once the disk answers."""
    held = HeldReads(monkeypatch)
    monkeypatch.setattr(reader, "_PAGE_S", 0.0)
    server = Server(engines, checkpoint, tmp_path / "kv")
    deployment = deployment_of(checkpoint)

    def ask_after_a_pause(number: int) -> None:
        server.lower._reader.pause._until = 0.0
        server.ask(request(deployment, [number, *PROMPT], max_tokens=1))

    with structlog.testing.capture_logs() as logs:
        for number in range(4):
            ask_after_a_pause(number)
    assert pauses(logs) == ["a read takes too long"] * 2
    paused = [each for each in logs if each["event"] == "kv_disk_paused"]
    assert [each["seconds"] for each in paused] == [60, 120]
    assert len(held.began) == 2
    held.go_on.set()
    wait_until(lambda: not any(server.lower._reader._read_now))
    monkeypatch.setattr(reader, "_PAGE_S", 1000.0)
    ask_after_a_pause(5)
    assert len(held.began) == 3
    server.stop()


def test_a_read_that_takes_as_long_as_the_computation_is_left(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequence starts with the pages that have arrived; further reads are tried."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    server.ask(asked(checkpoint))
    server.stop()
    held = HeldReads(monkeypatch, bytes.fromhex(files(folder)[3].name))
    server = Server(engines, checkpoint, folder)
    waiting = server.submit(asked(checkpoint))
    wait_until(lambda: num_installed(server) == 3)
    for fetch in server.lower._fetches.values():
        fetch.deadline = 0.0
    assert waiting.result() == (expected, 3 * 16)
    held.go_on.set()
    server.stop()
    assert server.disk.sum.bad_files == {"slow": 1}
    assert not server.disk.sum.is_paused


def test_a_disk_slower_than_the_model_is_tried_now_and_then(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new measurement may show that it pays again."""
    monkeypatch.setattr(lower_store.LowerStore, "_pays", PAYS)
    server = Server(engines, checkpoint, tmp_path / "kv")
    server.lower._page_computed_s = 0.010
    for page_s, pays in ((None, True), (0.009, True), (0.011, False)):
        server.lower._reader.page_s = page_s
        assert server.lower._pays(1) == pays
    assert [server.lower._pays(1) for _ in range(64)].count(True) == 1
    server.stop()


def test_an_aborted_request_lets_go_of_what_it_waits_for(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages that had arrived stay cached, and no page is lost."""
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder)
    server.ask(asked(checkpoint))
    server.stop()
    held = HeldReads(monkeypatch, bytes.fromhex(files(folder)[2].name))
    server = Server(engines, checkpoint, folder)
    one = asked(checkpoint)
    waiting = server.submit(one)
    wait_until(lambda: num_installed(server) == 2)
    server.engine.abort(one.request_id)
    waiting.result()
    held.go_on.set()
    wait_until(lambda: server.engine._core.scheduler.pool.num_used == 0)
    assert server.engine._core.scheduler.pool.num_cached == 2
    assert server.ask(asked(checkpoint))[1] == NUM_PAGES * 16
    server.stop()


def test_a_request_whose_pages_are_read_is_in_the_gauges(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits, and holds the pages of its prompt."""
    held = HeldReads(monkeypatch)
    server = Server(engines, checkpoint, tmp_path / "kv")
    waiting = server.submit(asked(checkpoint))
    wait_until(lambda: server.disk.gauges[1] == 1)
    assert server.disk.gauges == (0, 1, NUM_PAGES + 1)
    held.go_on.set()
    waiting.result()
    server.stop()
    assert server.disk.gauges == (0, 0, 0)


def test_no_page_with_a_number_that_is_not_finite_is_written(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Else the file would end every later request with its prefix."""
    server = Server(engines, checkpoint, tmp_path / "kv")
    lower = server.lower
    copy_out = lower._memory.copy_out
    numbers = iter(range(100))

    def damaged(page: int, into: Any) -> None:
        copy_out(page, into)
        if next(numbers) == 2:
            into.view("float32")[100] = float("inf")

    lower._memory.copy_out = damaged  # type: ignore[method-assign]
    server.ask(asked(checkpoint))
    server.stop()
    assert server.pages == {"written": NUM_PAGES - 1, "dropped": 1}
