"""Answers that no store gives: a miss, a pause, and no word of a password."""

import re
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from ropewalk.model_runtime.engine.kv_disk import reader
from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.files.page_file import BadPageError, PageFormat
from ropewalk.model_runtime.engine.kv_disk.page_store import StoreError
from ropewalk.model_runtime.engine.kv_disk.reader import Fetch, Reader
from ropewalk.model_runtime.engine.kv_disk.stores.store_url import parse_store_url
from ropewalk.model_runtime.engine.kv_disk.stores.valkey_store import ValkeyStore
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.scheduling.read_plan import wanted_pages
from tests.doubles.engines import EngineFactory, answer
from tests.model_runtime.engine.kv_disk.disk_engines import Server, with_weights
from tests.model_runtime.engine.kv_disk.test_valkey_store import PASSWORD, asked, pauses

FORM = PageFormat(bytes(32), 64, 3, "int4", keys_by_token=False, num_bytes=5000)


@contextmanager
def answering(answer_of: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that speaks no protocol of ours; the address of it as a store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:  # closed
                    return
                with client:
                    answer_of(client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"valkey://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def nothing(client: socket.socket) -> None:
    """Close at once."""


def http(client: socket.socket) -> None:
    client.recv(100)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def no_numbers(client: socket.socket) -> None:
    """A length that is none, and bytes that are no text."""
    client.recv(100)
    client.sendall(b"$\xff\xfe\r\n-\xff\r\n")


def always(answer: bytes) -> Callable[[socket.socket], None]:
    """Give every command of a connection the same answer."""

    def answer_of(client: socket.socket) -> None:
        while commands := client.recv(1 << 16):
            # One or more of them, each an array.
            client.sendall(answer * len(re.findall(rb"\*\d+\r\n\$", commands)))

    return answer_of


@contextmanager
def faked(answer: bytes, user: str = "") -> Iterator[ValkeyStore]:
    """A store whose server always answers so."""
    with answering(always(answer)) as url:
        store = ValkeyStore(parse_store_url(url.replace("//", f"//{user}")), FORM)
        try:
            yield store
        finally:  # the server waits for it
            store._client.close()


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":1\r\n", b"*1\r\n:1\r\n"])
def test_answers_of_another_meaning_are_faults_of_the_store(answer: bytes) -> None:
    """A look without `used_memory`, and a page that is a number or a list."""
    with faked(answer) as store:
        with pytest.raises(StoreError):
            store.look()
        with pytest.raises(BadPageError):
            store.get(bytes(32), memoryview(bytearray(5000)))


@pytest.mark.parametrize("shown", [PASSWORD, PASSWORD[:9], PASSWORD.replace("-", "\\-")])
def test_an_answer_that_repeats_the_password_is_not_told(shown: str) -> None:
    """Whole, cut off or with escapes, as servers repeat the arguments of an unknown command."""
    told = f"-ERR unknown command 'AUTH', with args beginning with: 'u' '{shown}\r\n"
    with faked(told.encode(), f"u:{PASSWORD}@") as store:
        with pytest.raises(StoreError, match="part of the password") as found:
            store.look()
        text = "".join(traceback.format_exception(found.value))
        assert not any(each in text for each in ("Secret", "9-stores"))


@pytest.mark.parametrize("answer_of", [nothing, http, no_numbers])
def test_a_place_that_is_no_store_is_a_miss_and_a_pause(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    tmp_path: Path,
    answer_of: Callable[[socket.socket], None],
) -> None:
    """Reads and writes have one line each, however many requests come."""
    checkpoint = with_weights(llama_checkpoint, tmp_path / "model")
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    with answering(answer_of) as url, structlog.testing.capture_logs() as logs:
        server = Server(engines, checkpoint, url)
        assert server.ask(asked(checkpoint)) == (expected, 0)
        for number in range(1, 4):
            server.ask(asked(checkpoint, number, max_tokens=1))
        server.stop()
    assert sorted(what for what, _ in pauses(logs)) == ["reads", "writes"]
    assert server.disk.sum.bad_files == {"unreachable": 1}
    assert set(server.pages) == {"dropped"}


def test_a_read_that_raises_anything_gives_its_memory_back() -> None:
    """Here by a fault of our own; the fetch ends, and the next one is served."""

    class Faulty:
        def get(self, key: bytes, into: memoryview) -> bool:
            raise TypeError(key, into)

    found = Reader(Buffers(8, 1), Counting(), lambda _: None)
    found.start(lambda: None)
    faulty: Any = Faulty()
    for _ in range(3):
        fetch = Fetch([b"a"], 0, wanted_pages([b"a"], 0, (None,), 16, set()), 0.0, [], [])
        found.submit(faulty, fetch)
        assert fetch.answered.wait(60)
        buffer = found.buffers.take()
        assert buffer is not None
        found.buffers.give(buffer)
    found.stop()


def test_the_time_of_a_page_is_a_running_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new time weighs a quarter: 4 s, then 8 s, are 5 s."""
    clock, taken, woken = SimpleNamespace(now=100.0), [4.0, 8.0], threading.Event()

    class Slow:
        def get(self, key: bytes, into: memoryview) -> bool:
            clock.now += taken.pop(0)
            return True

    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock.now))
    found, keys = Reader(Buffers(8, 2), Counting(), lambda _: None), [b"a", b"b"]
    found.start(woken.set)
    fetch = Fetch(keys, 0, wanted_pages(keys, 0, (None,), 16, set()), 0.0, [], [])
    store: Any = Slow()
    found.submit(store, fetch)
    while not fetch.is_done:
        assert woken.wait(60)
        woken.clear()
    found.stop()
    assert found.page_s == 5.0
