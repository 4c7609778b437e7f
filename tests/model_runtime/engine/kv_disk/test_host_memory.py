"""Pages in the memory of a GPU's host; a CPU stands for the GPU, and its copies run late."""

import random
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.kv_disk import build
from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause, StoreCounts
from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderStore
from ropewalk.model_runtime.engine.kv_disk.files.page_file import BadPageError, PageFormat
from ropewalk.model_runtime.engine.kv_disk.offload import device_pages
from ropewalk.model_runtime.engine.kv_disk.offload.host_memory import HostMemory
from ropewalk.model_runtime.engine.kv_disk.reader import Fetch, Reader
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.scheduling.read_plan import wanted_pages
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.playground.stats import read_stats
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.waiting import wait_until
from tests.model_runtime.engine.kv_disk import late_copies
from tests.model_runtime.engine.kv_disk.disk_engines import (
    NUM_PAGES,
    PROMPT,
    Server,
    files,
    with_weights,
    written,
)

GIB = 0.25
NUM_BYTES = 100
FORM = PageFormat(bytes(32), 64, 3, "float32", keys_by_token=False, num_bytes=NUM_BYTES)


def asked(checkpoint: Checkpoint, number: int = 0) -> Request:
    """A request for a prompt of twelve pages; those of other numbers share none."""
    prompt = [100 + number, *PROMPT[1:]]
    return request(deployment_of(checkpoint), prompt, max_tokens=4, logprobs=2)


def told_by_stats(counts: StoreCounts) -> dict[str, Any]:
    """The answer of /stats of a server whose lower store has reported these counts."""
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=16, kv_offload_gib=GIB)
    metrics = Metrics(MetricFactory(), (64, 256), config, (), {"pages": 4096})
    metrics.pages_stored(counts)
    found: dict[str, Any] = read_stats(metrics).model_dump(mode="json")
    return found


@pytest.mark.parametrize("is_held", [False, True])
def test_evicted_prefixes_come_back_with_the_same_bits(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_held: bool,
) -> None:
    """The cache holds one prompt. Held copies run only before the step that evicts their pages."""
    checkpoint = llama_checkpoint
    expected = [answer(engines.over(checkpoint), asked(checkpoint, each))[0] for each in range(3)]
    stream = late_copies.use(monkeypatch, is_held=is_held)
    server = Server(engines, checkpoint, None, kv_offload_gib=GIB, kv_cache_tokens=16 * 16)
    memory = server.lower._writer.store
    assert isinstance(memory, HostMemory)
    for at in range(9):
        num_evicted = min(max(at - 1, 0), 3)  # prompts; the last one's copies may not have run
        wait_until(lambda least=num_evicted * NUM_PAGES: len(memory._held) >= least)
        if not is_held:
            written(server)
        result, num_cached = server.ask(asked(checkpoint, at % 3))
        assert result == expected[at % 3]
        assert num_cached == (NUM_PAGES * 16 if at >= 3 else 0)
    stream.may_run.set()
    server.stop()
    found = server.disk.sum
    assert found.num_tokens_read == 16 * server.pages["read"]
    assert found.memory["read"] >= 6 * NUM_PAGES
    assert stream.num_waits >= NUM_PAGES
    assert found.num_memory_bytes == 3 * NUM_PAGES * server.lower._memory.num_bytes
    assert told_by_stats(found)["kv_offload"] == {
        "bytes": found.num_memory_bytes,
        "pages_read": found.memory["read"],
        "pages_evicted": 0,
    }


def test_answers_under_load_have_the_same_bits(
    engines: EngineFactory, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts share prefixes, run together, and evict each other's pages in a small memory, too."""
    checkpoint, draw = llama_checkpoint, random.Random(3)
    prompts = [[100 + at % 3, *PROMPT[1 : 40 + 30 * at]] for at in range(6)]
    asks = [
        request(deployment_of(checkpoint), draw.choice(prompts), max_tokens=5, logprobs=1)
        for _ in range(36)
    ]
    expected = [answer(engines.over(checkpoint), each)[0] for each in asks]
    late_copies.use(monkeypatch)
    limits = {"kv_cache_tokens": 24 * 16, "max_model_len": 24 * 16}
    page_bytes = Server(
        engines, checkpoint, None, kv_offload_gib=GIB, **limits
    ).lower._memory.num_bytes
    small = Server(engines, checkpoint, None, kv_offload_gib=20.5 * page_bytes / 2**30, **limits)
    found = []
    for at in range(0, len(asks), 4):
        found += answer(small.engine, *asks[at : at + 4])
    small.stop()
    assert found == expected
    assert small.disk.sum.memory["read"] > 0
    assert small.disk.sum.memory["evicted"] > 0
    assert small.disk.sum.num_memory_bytes <= 20 * page_bytes


def test_memory_comes_before_the_folder_and_is_filled_from_it(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart, pages come from the folder once, and then from memory."""
    checkpoint = with_weights(llama_checkpoint, tmp_path / "model")
    late_copies.use(monkeypatch)
    limits = {"kv_offload_gib": GIB, "kv_cache_tokens": 16 * 16}
    folder = tmp_path / "kv"
    server = Server(engines, checkpoint, folder, **limits)
    expected, _ = server.ask(asked(checkpoint))
    server.stop()
    names = {path.name for path in files(folder)}
    assert len(names) == NUM_PAGES
    server = Server(engines, checkpoint, folder, **limits)
    reads: list[bytes] = []
    read = FolderStore.get
    monkeypatch.setattr(
        FolderStore, "get", lambda of, key, into: reads.append(key) or read(of, key, into)
    )
    for _ in range(2):
        assert server.ask(asked(checkpoint)) == (expected, NUM_PAGES * 16)
        server.ask(asked(checkpoint, 1))  # evicts it
        written(server)
    server.stop()
    own = [each for each in reads if each.hex() in names]
    assert len(own) == len(set(own)) == NUM_PAGES
    assert server.disk.sum.memory["read"] >= NUM_PAGES


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def memory_of(num_pages: int, below: Any = None) -> HostMemory:
    """Room for so many pages, and a half."""
    most_bytes = num_pages * NUM_BYTES + NUM_BYTES // 2
    return HostMemory(FORM, most_bytes, Counting(), below, Pause("reads"))


def below_of(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "kv", FORM, 1 << 20, Counting())


def held(memory: HostMemory, keys: range) -> list[int]:
    return [number for number in keys if key_of(number) in memory._held]


def test_the_pages_not_used_for_longest_go_and_the_last_of_a_prefix_first() -> None:
    """A read and a touch are uses."""
    memory = memory_of(4)
    page = memoryview(bytes(NUM_BYTES))
    for depth in range(4):
        memory.put(key_of(depth), page, depth)
    memory.put(key_of(10), page, 0)
    assert held(memory, range(11)) == [0, 1, 2, 10]
    memory.put(key_of(11), page, 0)
    assert held(memory, range(12)) == [0, 1, 10, 11]
    memory.touch([(key_of(1), 0)])
    assert memory.get(key_of(0), memoryview(bytearray(NUM_BYTES)))
    memory.put(key_of(12), page, 0)
    assert held(memory, range(13)) == [0, 1, 11, 12]


def test_memory_is_bounded_however_often_pages_are_used() -> None:
    memory = memory_of(8)
    draw = random.Random(1)
    contents = {number: secrets.token_bytes(NUM_BYTES) for number in range(20)}
    into = bytearray(NUM_BYTES)
    for _ in range(3000):
        number = draw.randrange(20)
        if memory.get(key_of(number), memoryview(into)):
            assert bytes(into) == contents[number]
        else:
            memory.put(key_of(number), memoryview(contents[number]), number % 5)
        assert len(memory._held) <= 8
    counts = memory._counting.take(is_paused=False)
    assert counts is not None
    assert counts.num_memory_bytes == 8 * NUM_BYTES
    memory.evict([key_of(each) for each in range(20)])
    assert held(memory, range(20)) == []


def test_a_page_is_written_below_unless_it_is_there(tmp_path: Path) -> None:
    """A deletion is for both."""
    folder = below_of(tmp_path)
    memory, other = memory_of(2, folder), memory_of(2, folder)
    content = np.arange(NUM_BYTES, dtype=np.uint8)
    memory.put(key_of(1), content.data, 0)
    into = bytearray(NUM_BYTES)
    assert folder.get(key_of(1), memoryview(into))
    assert other.get(key_of(1), memoryview(into))
    assert bytes(into) == content.tobytes()
    assert held(other, range(2)) == [1]
    other.evict([key_of(1)])
    assert not folder.get(key_of(1), memoryview(into))
    assert not other.get(key_of(1), memoryview(into))


def test_the_depth_of_a_page_from_below_is_that_of_its_next_write(tmp_path: Path) -> None:
    """A read does not know it, and does not forget it."""
    folder = below_of(tmp_path)
    memory, page = memory_of(2, folder), memoryview(bytes(NUM_BYTES))
    folder.put(key_of(1), page, 9)
    assert memory.get(key_of(1), memoryview(bytearray(NUM_BYTES)))
    assert not memory.put(key_of(1), page, 9)  # below it is there
    memory._keep(key_of(1), page, None)
    assert memory._held[key_of(1)].depth == 9


class Unreachable(FolderStore):
    """A place whose reads fail, and are counted."""

    num_asked = 0

    def get(self, key: bytes, into: memoryview) -> bool:
        """Fail as a store that is gone."""
        self.num_asked += 1
        raise BadPageError("unreachable") from OSError("gone")


def test_memory_is_read_while_the_place_behind_it_pauses(tmp_path: Path) -> None:
    """That is asked once; then what memory lacks is absent."""
    below, counting, pause = (
        Unreachable(tmp_path / "kv", FORM, 1 << 20, Counting()),
        Counting(),
        Pause("reads"),
    )
    memory = HostMemory(FORM, 8 * NUM_BYTES, counting, below, pause)
    memory.put(key_of(1), memoryview(bytes(NUM_BYTES)), 0)
    reader = Reader(Buffers(NUM_BYTES, 4), counting, lambda _: None, pause)
    found = []
    for _ in range(3):
        for key in (key_of(2), key_of(1)):
            assert reader.is_usable(0.0)
            fetch = Fetch([key], 0, wanted_pages([key], 0, (None,), 64, set()), 0.0, [], [])
            reader._read(memory, fetch)
            found.append(len(fetch.arrived))
            reader.give_up(fetch)
    assert pause.is_on
    assert below.num_asked == 1
    assert found == [0, 1] * 3
    counts = counting.take(is_paused=True)
    assert counts is not None
    assert counts.bad_files == {"unreachable": 1}


def test_memory_that_cannot_be_had_is_given_back_and_no_error() -> None:
    """Pinned memory, too, can run out; later there may be some."""
    fails = True

    def new(num_bytes: int) -> np.ndarray:
        if fails:
            raise RuntimeError("CUDA error: out of memory")
        return np.zeros(num_bytes, np.uint8)

    buffers = Buffers(8, 2, new)
    for _ in range(3):
        assert buffers.take() is None
        assert buffers.take(0.001) is None
    fails = False
    taken = [buffers.take() for _ in range(3)]
    assert [each is None for each in taken] == [False, False, True]


def test_a_device_without_memory_for_two_pages_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies of pages have memory of their own there."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 MiB")

    monkeypatch.setattr(device_pages, "DevicePages", fail)
    monkeypatch.setattr(device_pages, "SideStream", lambda _: None)
    store: Any = SimpleNamespace(page_bytes=list)
    config: Any = SimpleNamespace(kv_offload_gib=1.0)
    sentence = "kv_offload_gib needs the memory of two pages on cuda, and it is not free: tried to"
    with pytest.raises(ModelError, match=sentence):
        build._copies(torch.device("cuda"), config, store)


@pytest.mark.parametrize(
    ("gib", "sentence"),
    [
        (1e-9, "kv_offload_gib must be >= .*, for one page of .*, got 1e-09"),
        (1e6, r"pages in host memory \(kv_offload_gib 1e\+06\) need .*, this machine has"),
    ],
)
def test_a_size_that_cannot_be_had_is_refused(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    gib: float,
    sentence: str,
) -> None:
    """Less than a page, or more than the machine has."""
    late_copies.use(monkeypatch)
    with pytest.raises(ModelError, match=sentence):
        engines.over(llama_checkpoint, kv_offload_gib=gib)


def test_a_cpu_is_refused(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """Its cache is host memory."""
    with pytest.raises(ModelError, match=r"kv_offload_gib is for a GPU: .* raise kv_cache_gib"):
        engines.over(llama_checkpoint, kv_offload_gib=1.0)
