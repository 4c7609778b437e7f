"""One reader gives the outputs of a replica to their requests, and tells them when it is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ropewalk.model_runtime.request import Output
from ropewalk.server.replicas.channel import Entry, OutputChannel
from ropewalk.server.replicas.remote_engine import LOST_REASONS, ReplicaLostError
from ropewalk.server.replicas.wire import OutputDecoder, OutputEncoder
from tests.virtual_time import run_at_once

LIMIT_S = 20.0  # for anything here


class Gone(Exception):  # noqa: N818  # as Ray names its own
    """The replica has ended."""


class Stream:
    """The messages of a replica, until a test lets it fail or end."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[list[Entry] | BaseException | None] = asyncio.Queue()
        self.num_cancels = 0

    def send(self, sent: list[Entry] | BaseException | None) -> None:
        """Send a message, an error, or None for the end."""
        self._sent.put_nowait(sent)

    def cancel(self) -> None:
        """Count, as Ray's streams can be cancelled."""
        self.num_cancels += 1

    def __aiter__(self) -> AsyncIterator[list[Entry]]:
        return self

    async def __anext__(self) -> list[Entry]:
        sent = await self._sent.get()
        if sent is None:
            raise StopAsyncIteration
        if isinstance(sent, BaseException):
            raise sent
        return sent


class Receiver:
    """A request, and what it heard."""

    def __init__(self) -> None:
        self.received: list[tuple[Any, ...] | str] = []
        self.lost: list[ReplicaLostError] = []

    def receive(self, fields: tuple[Any, ...] | str) -> None:
        """Take an output."""
        self.received.append(fields)

    def lose(self, error: ReplicaLostError) -> None:
        """Take the end."""
        self.lost.append(error)


class Bench:
    """A channel with two receivers."""

    def __init__(self, silence_s: float = 5.0) -> None:
        self.stream = Stream()
        self.num_messages = 0
        self.channel = OutputChannel(
            "a", self.stream, self._count, silence_s=silence_s, gone=(Gone,)
        )
        self.receivers = [Receiver(), Receiver()]
        for number, receiver in enumerate(self.receivers):
            self.channel.add(number, receiver)

    def _count(self) -> None:
        self.num_messages += 1

    @property
    def reasons(self) -> list[list[str]]:
        """The reasons that each receiver heard."""
        assert all(each.replica == "a" for one in self.receivers for each in one.lost)
        return [[each.reason for each in one.lost] for one in self.receivers]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition."""
        while not condition():  # noqa: ASYNC110  # a condition of any kind
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on an event loop."""
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))  # type: ignore[arg-type]


def test_each_output_goes_to_its_run_and_unknown_runs_are_ignored() -> None:
    """A message is followed by one call; a sign of life by none."""

    async def test() -> None:
        bench = Bench()
        bench.stream.send([(0, (0, "a")), (1, (0, "x")), (9, (0, "of another")), (0, (1, "b"))])
        bench.stream.send([])
        bench.stream.send([(1, "stopped")])
        await bench.until(lambda: bench.num_messages == 2)
        assert [each.received for each in bench.receivers] == [
            [(0, "a"), (1, "b")],
            [(0, "x"), "stopped"],
        ]
        bench.channel.remove(1)
        bench.channel.remove(1)
        assert bench.channel.num_receivers == 1
        bench.stream.send([(1, (1, "late")), (0, (2, "c"))])
        await bench.until(lambda: bench.num_messages == 3)
        assert len(bench.receivers[1].received) == 2
        assert bench.reasons == [[], []]
        bench.channel.close()

    run(test)


@pytest.mark.parametrize("end", [Gone(), None, ValueError("of the engine")])
def test_every_open_run_is_lost_when_the_stream_ends(end: BaseException | None) -> None:
    """However it ends; a run that was removed hears nothing."""

    async def test() -> None:
        bench = Bench()
        bench.channel.remove(1)
        bench.stream.send([(0, (0, "a"))])
        bench.stream.send(end)
        await bench.until(lambda: bool(bench.receivers[0].lost))
        assert bench.reasons == [["died"], []]
        assert not bench.channel.is_open
        assert bench.stream.num_cancels == 1

    run(test)


def test_a_silent_replica_is_lost_and_signs_of_life_keep_one_open() -> None:
    """The limit counts from the last message, not from the start."""

    async def test() -> None:
        bench = Bench(silence_s=0.2)
        for _ in range(5):
            bench.stream.send([])
            await asyncio.sleep(0.1)
        assert bench.channel.is_open
        last = asyncio.get_running_loop().time()
        await bench.until(lambda: bool(bench.receivers[0].lost))
        # The last message came 0.1 s before, and the next look is at most 0.05 s late.
        assert 0.1 <= asyncio.get_running_loop().time() - last <= 0.16
        assert bench.reasons == [["silent"], ["silent"]]
        assert not bench.channel.is_open
        assert bench.stream.num_cancels == 1

    run_at_once(test())


def test_a_replica_is_not_silent_because_this_process_stood_still() -> None:
    """The messages of that time are read first."""

    async def test() -> None:
        bench = Bench(silence_s=0.2)
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # noqa: ASYNC251  # the event loop itself
        bench.stream.send([(0, (0, "a"))])
        await bench.until(lambda: bench.num_messages == 1)
        assert bench.channel.is_open
        assert bench.reasons == [[], []]
        bench.channel.close()

    run(test)


def test_a_run_with_a_gap_is_lost_and_the_others_go_on() -> None:
    """Outputs are numbered, because a client must not see the gap."""

    class Decoding(Receiver):
        def __init__(self) -> None:
            super().__init__()
            self._decoder = OutputDecoder()

        def receive(self, fields: tuple[Any, ...] | str) -> None:
            assert not isinstance(fields, str)
            self.received.append(self._decoder.decode(fields))

    async def test() -> None:
        bench = Bench()
        bench.receivers = [Decoding(), Decoding()]
        encoders = [OutputEncoder(), OutputEncoder()]
        for number, receiver in enumerate(bench.receivers):
            bench.channel.add(number, receiver)
        sent = [
            [encoder.encode(Output(text=text, token_ids=(1,))) for text in "abc"]
            for encoder in encoders
        ]
        bench.stream.send([(0, sent[0][0]), (1, sent[1][0])])
        bench.stream.send([(0, sent[0][2]), (1, sent[1][1])])
        await bench.until(lambda: bench.num_messages == 2)
        assert bench.reasons == [["missing"], []]
        assert "missing" in LOST_REASONS
        assert [each.text for each in bench.receivers[1].received] == ["a", "b"]
        assert bench.channel.is_open
        bench.channel.close()

    run(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_closed_channel_ends_its_stream(has_begun: bool) -> None:  # noqa: FBT001
    """Even if it is closed before it began to read."""

    async def test() -> None:
        bench = Bench()
        if has_begun:
            await asyncio.sleep(0)
        for number in range(2):
            bench.channel.remove(number)
        bench.channel.close()
        assert not bench.channel.is_open
        await bench.until(lambda: bench.stream.num_cancels == 1)
        assert bench.reasons == [[], []]

    run(test)
