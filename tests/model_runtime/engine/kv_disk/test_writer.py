"""The order of the writer's work, over a store that only notes what is asked of it."""

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import structlog

from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.finite import IsFinite, plain_check
from ropewalk.model_runtime.engine.kv_disk.page_store import Look, StoreError
from ropewalk.model_runtime.engine.kv_disk.writer import Copied, Writer


class Noting:
    """A store that holds nothing; `fault` is raised by what follows."""

    def __init__(self) -> None:
        self.form: Any = SimpleNamespace(identity=bytes(32), name="0" * 32)
        self.done: list[tuple[str, Any]] = []
        self.fault: Exception | None = None
        self.is_new = True  # what is written
        self.pages: dict[bytes, bytes] = {}
        self.num_looks = 0

    def _note(self, what: str, which: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.done.append((what, which))

    def put(self, key: bytes, page: memoryview, depth: int) -> bool:
        self._note("put", key)
        self.pages[key] = bytes(page)
        return self.is_new

    def evict(self, keys: Sequence[bytes]) -> None:
        self._note("evict", list(keys))

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        self._note("touch", list(pages))

    def look(self) -> Look:
        if self.fault is not None:
            raise self.fault
        self.num_looks += 1
        return Look(0, "name")


def writer_over(store: Noting, is_finite: IsFinite = lambda _: True) -> Writer:
    """A writer without its thread: a test calls `_serve_next`."""
    writer = Writer("", lambda: store, is_finite, Buffers(8, 4), Counting())  # type: ignore[arg-type, return-value]
    assert writer._open()
    return writer


def put(writer: Writer, key: bytes) -> None:
    buffer = writer.buffers.take()
    assert buffer is not None
    writer.put(Copied(key, 0, buffer, len(buffer)))


def serve_all(writer: Writer) -> None:
    while not writer._queue.empty():
        assert writer._serve_next()


def pages_of(prefix: int, num: int) -> list[tuple[bytes, int]]:
    """The keys of a prefix with their depths."""
    return [(key, depth) for depth, key in enumerate(keys_of(prefix, num))]


def keys_of(prefix: int, num: int) -> list[bytes]:
    return [bytes([prefix, *divmod(number, 256)]) for number in range(num)]


def test_a_page_is_touched_once_a_minute() -> None:
    """A page that was just written is not touched either."""
    store = Noting()
    writer = writer_over(store)
    keys = keys_of(0, 3)
    put(writer, keys[0])
    for _ in range(3):
        writer.used(pages_of(0, 3))
    serve_all(writer)
    assert store.done[1:] == [("touch", [(keys[1], 1), (keys[2], 2)])]
    writer._touched.update(dict.fromkeys(keys, time.monotonic() - 61))
    writer.used(pages_of(0, 3))
    serve_all(writer)
    assert store.done[-1] == ("touch", pages_of(0, 3))


def test_pages_to_be_touched_wait_in_bounded_memory() -> None:
    """The disk may hang for hours while prefixes in memory are in use."""
    writer = writer_over(Noting())
    for number in range(2000):
        writer.used([(number.to_bytes(32, "big"), 0)])
    assert writer._queue.qsize() == 1024


def test_a_store_that_does_not_answer_is_not_told_as_open() -> None:
    """Its line comes once, after the first answer."""
    store = Noting()
    store.fault = StoreError("Connection refused.")
    with structlog.testing.capture_logs() as logs:
        writer = writer_over(store)
        assert [(each["event"], each.get("reason")) for each in logs] == [
            ("kv_disk_paused", "Connection refused.")
        ]
        store.fault, writer.pause._until = None, 0.0
        for _ in range(2):
            writer._looked_s = -math.inf
            writer._look_if_due()
    assert [each["event"] for each in logs[1:]] == ["kv_disk_open"]


def test_a_fault_of_a_touch_or_a_deletion_pauses_the_writes() -> None:
    """A deletion is tried all the same."""
    store = Noting()
    writer = writer_over(store)
    store.fault = StoreError("gone")
    writer.used(pages_of(0, 40))
    assert writer._serve_next()
    assert writer.pause.is_on
    put(writer, b"a")
    assert writer._serve_next()
    assert store.done == []
    store.fault = None
    writer.delete([b"x"])
    assert writer._serve_next()
    assert store.done == [("evict", [b"x"])]


def test_a_busy_writer_looks_again_when_its_time_has_come() -> None:
    """A store on the network never uses up what may be written before the next look."""
    store = Noting()
    writer = writer_over(store)
    for num_looks in (1, 2):
        for key in (b"a", b"b"):
            put(writer, key)
            assert writer._serve_next()
        assert store.num_looks == num_looks
        writer._looked_s -= 601


def test_the_place_is_known_although_all_pages_are_there_after_a_fault_at_the_start() -> None:
    """During the pause there is no look."""
    store = Noting()
    store.is_new, store.fault = False, StoreError("gone")
    writer = writer_over(store)
    store.fault = None
    for is_over in (False, True):
        if is_over:
            writer.pause._until = 0.0
        put(writer, b"a")
        assert writer._serve_next()
        assert store.num_looks == is_over
    counts = writer._counting.take(is_paused=False)
    assert counts is not None
    assert counts.place is not None


def test_places_without_a_layer_are_written_as_zeros_and_before_the_check() -> None:
    """They hold what another prompt left there, and its NaN says nothing about this page."""
    store = Noting()
    writer = writer_over(store, plain_check("float32"))
    buffer = writer.buffers.take()
    assert buffer is not None
    buffer.view(np.float32)[:] = 5, np.nan
    writer.put(Copied(b"a", 0, buffer, num_used=4))
    assert writer._serve_next()
    assert store.pages == {b"a": np.array([5, 0], np.float32).tobytes()}


def test_a_page_that_was_there_is_not_counted_as_written() -> None:
    """Host memory keeps it again, and the folder behind it has it already."""
    store = Noting()
    writer = writer_over(store)
    for is_new in (False, True):
        store.is_new = is_new
        put(writer, b"a" if is_new else b"b")
        assert writer._serve_next()
    counts = writer._counting.take(is_paused=False)
    assert counts is not None
    assert counts.pages == {"written": 1}
    assert counts.num_bytes == 8
