"""A lower store over a pool of a few pages, without an engine and threads."""

from types import SimpleNamespace
from typing import Any

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.lower_store import LowerStore
from ropewalk.model_runtime.engine.kv_disk.reader import Fetch, Reader
from ropewalk.model_runtime.page_groups import PageGroups
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.rope import native_rope

PAGE = 8
DEPLOYMENT = make_deployment("m", native_rope({"max_position_embeddings": 256, "head_dim": 8}))


class Bench:
    """A scheduler of ten pages over a lower store; no thread reads, so a test says what arrives."""

    def __init__(self, **limits: Any) -> None:
        numbers = {"kv_cache_tokens": 10 * PAGE, "max_model_len": 80, "page_size": PAGE, **limits}
        self.scheduler = Scheduler(EngineConfig(**numbers))
        counting = Counting()
        self.buffers = Buffers(64, 8)
        memory: Any = SimpleNamespace(num_bytes=64, step_bytes=1 << 20, copy_in=lambda *_: None)
        reader = Reader(self.buffers, counting, lambda _: None)
        writer: Any = SimpleNamespace(
            is_off=False,
            store=object(),
            pause=SimpleNamespace(is_on=False),
            used=lambda _: None,
        )
        num_groups = self.scheduler.pages.num_groups
        self.lower = LowerStore(memory, writer, reader, counting, (64,) * num_groups)
        self.lower.serve(self.scheduler.pages)

    def add(self, num_tokens: int, salt: str = "", priority: int = 0) -> Sequence:
        """Queue a prompt."""
        tier_choice = DEPLOYMENT.choose(RopeRequest(), num_tokens, 4)
        sampling = SamplingParams(max_tokens=4)
        asked = Request("r", (0,) * num_tokens, sampling, tier_choice, salt, priority=priority)
        sequence = Sequence(asked)
        self.scheduler.add(sequence)
        return sequence

    def fetch(self, num_tokens: int, salt: str = "", priority: int = 0) -> tuple[Sequence, Fetch]:
        """Queue a prompt, and begin to read its pages."""
        sequence = self.add(num_tokens, salt, priority)
        self.scheduler.schedule()
        return sequence, self.lower._fetches[sequence]

    def arrive(self, fetch: Fetch, num_pages: int) -> None:
        """Let further pages arrive."""
        for _ in range(num_pages):
            buffer = self.buffers.take()
            assert buffer is not None
            at = len(fetch.held) - fetch.num_before + len(fetch.arrived)
            fetch.arrived.append((fetch.missing[at], buffer))

    def run(self) -> None:
        """Run one step of which every sequence gets a token."""
        for chunk in self.scheduler.schedule().chunks.values():
            is_last = chunk.is_last
            self.scheduler.computed(chunk)
            if is_last:
                chunk.sequence.token_ids.append(0)
        self.scheduler.check_integrity()


def test_a_read_holds_all_pages_of_its_prompt_and_none_twice() -> None:
    """Another prompt starts if it fits beside them."""
    bench = Bench()
    sequence, fetch = bench.fetch(6 * PAGE)
    pool = bench.scheduler.pool
    assert pool.num_used == 6
    large, small = bench.add(5 * PAGE, "large"), bench.add(4 * PAGE - 1, "small")
    bench.lower._writer.store = None  # these are not looked for
    bench.run()
    assert not large.is_running
    assert not small.is_running  # it is behind the one that does not fit
    bench.arrive(fetch, 5)
    fetch.is_done = True
    bench.run()
    assert sequence.is_running
    assert sequence.num_cached_tokens == 5 * PAGE
    assert pool.num_used == 6


def test_reads_count_as_sequences() -> None:
    """A prompt that could run waits for a place."""
    bench = Bench(max_num_seqs=1)
    sequence, fetch = bench.fetch(3 * PAGE)
    other = bench.add(PAGE - 1, "other")
    bench.run()
    assert bench.scheduler.running == []
    fetch.is_done = True  # there is nothing
    bench.run()
    assert bench.scheduler.running == [sequence]
    assert not other.is_running


def test_a_running_sequence_that_needs_a_page_ends_a_read_and_nobody_is_preempted() -> None:
    """What had arrived stays cached."""
    bench = Bench()
    running = bench.add(4 * PAGE - 1, "running")
    bench.lower._writer.store = None
    bench.run()
    bench.lower._writer.store = object()  # type: ignore[assignment]
    _, fetch = bench.fetch(6 * PAGE)
    bench.arrive(fetch, 2)
    bench.run()
    assert bench.lower.num_awaited == 1
    bench.run()  # the fifth page of the first sequence
    assert running.is_running
    assert bench.lower.num_awaited == 0
    assert fetch.is_given_up


def test_the_read_of_the_last_priority_ends_first_and_none_before_the_one_that_needs_pages() -> (
    None
):
    """Among equals the newest one ends, as in preemption."""
    bench = Bench(kv_cache_tokens=20 * PAGE)
    waiting = [
        bench.fetch(4 * PAGE, str(number), priority=priority)[0]
        for number, priority in enumerate((1, 2, 2, 0))
    ]
    ended = []
    for _ in waiting:
        before = set(bench.lower._fetches)
        if bench.lower.end_last(waiting[0].rank):
            ended += before - set(bench.lower._fetches)
    assert ended == [waiting[2], waiting[1], waiting[0]]
    assert set(bench.lower._fetches) == {waiting[3]}
    assert bench.lower.end_last(waiting[3].rank)
    assert not bench.lower.end_last(waiting[3].rank)


def test_a_page_that_another_sequence_has_computed_gives_its_place_back() -> None:
    """The page in the cache is shared."""
    bench = Bench()
    _, fetch = bench.fetch(4 * PAGE)
    pool, index = bench.scheduler.pool, bench.scheduler.pages.index
    (page,) = pool.allocate(1)
    index.publish(page, fetch.keys[0])
    pool.release([page])
    assert pool.num_used == 4
    bench.arrive(fetch, 2)
    bench.lower.collect(is_busy=False)
    assert pool.num_used == 4
    assert fetch.held[0] == page
    bench.scheduler.check_integrity()


def test_a_read_reserves_pages_beside_windows_before_the_place_found() -> None:
    """Those are held until the sequence starts further on, where it does not need them."""
    groups = PageGroups(((0,), (1,)), (None, 2 * PAGE))
    bench = Bench(kv_cache_tokens=64 * PAGE, page_groups=groups, max_num_batched_tokens=4 * PAGE)
    bench.lower._writer.store = None
    bench.add(3 * PAGE + 1)
    bench.run()
    bench.lower._writer.store = object()  # type: ignore[assignment]
    used: list[tuple[bytes, int]] = []
    bench.lower._writer.used = used.extend  # type: ignore[method-assign]
    sequence, fetch = bench.fetch(7 * PAGE + 1)
    assert fetch.num_before == 3
    assert len(fetch.held) == 3 + 2
    # Three pages of the group without a window are there, and no page that the windows need.
    assert len(fetch.reserved) == bench.scheduler.pages.num_to_hold(sequence) - 3
    fetch.is_done = True
    bench.run()
    assert sequence.is_running
    assert [depth for _, depth in used] == [0, 1, 1, 2, 2]  # by position, not by place in the list
