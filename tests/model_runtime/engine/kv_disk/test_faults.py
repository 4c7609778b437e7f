"""No fault of the disk ends or delays a request, and each is counted."""

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from ropewalk.model_runtime.engine.kv_disk import page_file, reader, tier
from ropewalk.model_runtime.engine.kv_disk.folder import PageFolder
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Output
from tests.engines import EngineFactory, Result, answer, deployment_of, request
from tests.model_runtime.engine.kv_disk.disk_engines import (
    NUM_PAGES,
    PROMPT,
    Server,
    files,
    flip,
    wait_until,
    with_weights,
)

PAYS = tier.DiskTier._pays


@pytest.fixture
def checkpoint(llama_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return with_weights(llama_checkpoint, tmp_path / "model")


def asked(checkpoint: Checkpoint, **options: Any) -> Any:
    """A request for a prompt of twelve pages."""
    return request(deployment_of(checkpoint), PROMPT, **{"max_tokens": 4, "logprobs": 2, **options})


def truncated(path: Path) -> None:
    os.truncate(path, 900)


def flipped(path: Path) -> None:
    flip(path, 700)


def of_another_key(path: Path) -> None:
    """The page before it in its place."""
    shutil.copyfile(files(path.parents[3])[3], path)


def linked(path: Path) -> None:
    """A link to a whole page."""
    path.rename(path.parents[4] / "page")
    path.symlink_to(path.parents[4] / "page")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (truncated, "truncated"),
        (flipped, "checksum"),
        (of_another_key, "foreign"),
        (linked, "unreadable"),
        (a_fifo, "foreign"),
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


def pauses(logs: list[Any]) -> list[str]:
    """The reasons of the lines about pauses."""
    return [each["reason"] for each in logs if each["event"] == "kv_disk_paused"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_page_pauses_the_writes_with_one_line(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
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
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(page_file.os, "writev", refused)
    with structlog.testing.capture_logs() as logs:
        server = Server(engines, checkpoint, folder)
        assert server.ask(asked(checkpoint)) == (expected, 3 * 16)
        server.stop()
    assert pauses(logs) == [os.strerror(number)]
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
        shutil.rmtree(folder)
        first, _ = server.ask(asked(checkpoint))
        wait_until(lambda: bool(pauses(logs)))
        assert not folder.exists()
        folder.mkdir(mode=0o700)
        server.tier._writer.pause._until = 0.0
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
    goes_on = threading.Event()
    hangs = threading.Event()
    read = PageFolder.read

    def slow(folder: PageFolder, key: bytes, into: memoryview) -> bool:
        hangs.set()
        goes_on.wait(60)
        return read(folder, key, into)

    monkeypatch.setattr(PageFolder, "read", slow)
    server = Server(engines, checkpoint, folder)
    outputs: list[Output] = []
    ended = threading.Event()

    def collect(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            ended.set()

    server.engine.submit(asked(checkpoint), collect)
    assert hangs.wait(30)
    short = request(deployment_of(checkpoint), [7, 8, 9], max_tokens=3)
    server.engine.generate([short])  # its prompt fills no page
    assert not outputs
    monkeypatch.setattr(reader, "_UNKNOWN_S", 0.0)
    monkeypatch.setattr(reader, "_LEAST_PATIENCE_S", 0.0)
    assert ended.wait(60)
    assert not goes_on.is_set()
    assert Result.of(outputs) == expected
    assert outputs[-1].num_cached_tokens == 0
    other = request(deployment_of(checkpoint), PROMPT[::-1], max_tokens=1)
    server.ask(other)  # no read is tried during the pause
    goes_on.set()
    server.stop()
    assert server.disk.sum.bad_files == {"slow": 1}
    assert server.disk.sum.is_paused


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
    goes_on = threading.Event()
    fourth = bytes.fromhex(files(folder)[3].name)
    read = PageFolder.read

    def slow(folder: PageFolder, key: bytes, into: memoryview) -> bool:
        if key == fourth:
            goes_on.wait(60)
        return read(folder, key, into)

    monkeypatch.setattr(PageFolder, "read", slow)
    server = Server(engines, checkpoint, folder)
    outputs: list[Output] = []
    ended = threading.Event()

    def collect(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            ended.set()

    server.engine.submit(asked(checkpoint), collect)
    wait_until(lambda: len(server.tier.held()) == 3)
    for fetch in server.tier._fetches.values():
        fetch.deadline = 0.0
    assert ended.wait(60)
    assert (Result.of(outputs), outputs[-1].num_cached_tokens) == (expected, 3 * 16)
    goes_on.set()
    server.stop()
    assert server.disk.sum.bad_files == {"slow": 1}
    assert not server.disk.sum.is_paused


def test_a_disk_slower_than_the_model_is_tried_now_and_then(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new measurement may show that it pays again."""
    monkeypatch.setattr(tier.DiskTier, "_pays", PAYS)
    server = Server(engines, checkpoint, tmp_path / "kv")
    server.tier._page_computed_s = 0.010
    for page_s, pays in ((None, True), (0.009, True), (0.011, False)):
        server.tier._reader.page_s = page_s
        assert server.tier._pays() == pays
    assert [server.tier._pays() for _ in range(64)].count(True) == 1
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
    goes_on = threading.Event()
    read = PageFolder.read
    third = bytes.fromhex(files(folder)[2].name)

    def slow(folder: PageFolder, key: bytes, into: memoryview) -> bool:
        if key == third:
            goes_on.wait(60)
        return read(folder, key, into)

    monkeypatch.setattr(PageFolder, "read", slow)
    server = Server(engines, checkpoint, folder)
    ended = threading.Event()
    one = asked(checkpoint)

    def collect(output: Output) -> None:
        if output.finish_reason is not None:
            ended.set()

    server.engine.submit(one, collect)
    wait_until(lambda: len(server.tier.held()) == 2)
    server.engine.abort(one.request_id)
    assert ended.wait(30)
    goes_on.set()
    wait_until(lambda: server.engine._core.scheduler.pool.num_used == 0)
    assert server.engine._core.scheduler.pool.num_cached == 2
    assert server.ask(asked(checkpoint))[1] == NUM_PAGES * 16
    server.stop()


def test_no_page_with_a_number_that_is_not_finite_is_written(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Else the file would end every later request with its prefix."""
    server = Server(engines, checkpoint, tmp_path / "kv")
    tier = server.tier
    copy_out = tier._memory.copy_out
    numbers = iter(range(100))

    def damaged(page: int, into: Any) -> None:
        copy_out(page, into)
        if next(numbers) == 2:
            into.view("float32")[100] = float("inf")

    tier._memory.copy_out = damaged  # type: ignore[method-assign]
    server.ask(asked(checkpoint))
    server.stop()
    assert server.pages == {"written": NUM_PAGES - 1, "dropped": 1}
