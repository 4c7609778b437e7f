"""Outputs of the engine's thread reach the reader of their API process, in order and bounded."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest

from ropewalk.server.replicas.channel import Entry, Outbox, Outboxes
from tests.virtual_time import run_at_once

LIMIT_S = 20.0  # for anything here


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on an event loop."""
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))  # type: ignore[arg-type]


def engine_thread(outbox: Outbox, num_steps: int, ended: list[int]) -> threading.Thread:
    """A thread that puts up to four entries a step; the run of every fifth one ends."""

    def fill() -> None:
        rng, number = random.Random(0), 0
        for _ in range(num_steps):
            for _ in range(rng.randrange(5)):
                then = (lambda at=number: ended.append(at)) if number % 5 == 0 else None
                outbox.put((number, ("text",)), then)
                number += 1
            outbox.flush()
            if rng.random() < 0.05:
                time.sleep(0.001)
        outbox.put((-1, "over"))
        outbox.flush()

    return threading.Thread(target=fill)


def test_nothing_is_lost_and_the_order_stays_under_a_real_thread() -> None:
    """The loop takes while the thread fills."""

    async def test() -> None:
        outbox, ended, taken = Outbox(10**6), list[int](), list[Entry]()
        thread = engine_thread(outbox, 3000, ended)
        thread.start()
        async for entries in outbox.messages(5.0):
            taken += entries
            if entries and entries[-1] == (-1, "over"):
                break
        thread.join()
        numbers = [number for number, _ in taken[:-1]]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 3000
        assert ended == list(range(0, len(numbers), 5))

    run(test)


async def next_entries(messages: AsyncGenerator[list[Entry], None]) -> list[Entry]:
    """Return the next message that is not empty."""
    async for entries in messages:
        if entries:
            return entries
    return []


def test_a_silent_engine_gives_an_empty_message_after_the_limit() -> None:
    """It is the sign of life."""

    async def test() -> None:
        async with aclosing(Outbox(100).messages(0.02)) as messages:
            await anext(messages)
            clock = asyncio.get_running_loop().time
            began = clock()
            assert await anext(messages) == []
            assert clock() - began == pytest.approx(0.02)

    run_at_once(test())


def test_an_outbox_without_a_reader_keeps_its_bound_and_ends_its_reader() -> None:
    """All that was not read is dropped, and yet every run hears of its end."""

    async def test() -> None:
        outbox, ended = Outbox(10), list[int]()
        messages = outbox.messages(1.0)
        await anext(messages)
        for number in range(100):
            outbox.put((number, ("text",)), lambda at=number: ended.append(at))
            outbox.flush()
            await asyncio.sleep(0)
            assert len(outbox._ready) <= 10
        assert outbox.is_full
        assert [entries async for entries in messages] == []
        assert ended == list(range(100))

    run(test)


def test_a_full_outbox_serves_its_next_reader() -> None:
    """The API process may have stood still and come back."""

    async def test() -> None:
        outbox = Outbox(1)
        for number in range(3):
            outbox.put((number, ("text",)))
        outbox.flush()
        await asyncio.sleep(0)
        assert outbox.is_full
        async with aclosing(outbox.messages(1.0)) as messages:
            await anext(messages)
            outbox.put((7, ("text",)))
            outbox.flush()
            assert await anext(messages) == [(7, ("text",))]

    run(test)


def test_a_newer_reader_ends_the_older_and_misses_nothing_after_it() -> None:
    """The older one waits on a broken connection, and would take outputs into nowhere."""

    async def test() -> None:
        outbox = Outbox(100)
        older = outbox.messages(5.0)
        await anext(older)  # the first returns at once
        waiting = asyncio.ensure_future(anext(older, None))
        await asyncio.sleep(0)
        async with aclosing(outbox.messages(5.0)) as newer:
            reading = asyncio.ensure_future(anext(newer))
            await asyncio.sleep(0)
            outbox.put((1, ("text",)))
            outbox.flush()
            taken = await reading
            while not taken:
                taken = await anext(newer)
            assert taken == [(1, ("text",))]
            assert await waiting is None

    run(test)


def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    """The entries stay for the next one."""

    async def test() -> None:
        outbox = Outbox(100)
        messages = outbox.messages(5.0)
        assert await anext(messages) == []
        taking = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        taking.cancel()
        outbox.put((1, ("text",)))
        outbox.flush()
        assert await next_entries(outbox.messages(5.0)) == [(1, ("text",))]

    run(test)


def test_flush_after_the_end_of_the_event_loop_does_nothing() -> None:
    """The engine's thread may be the last of a process that ends."""

    async def made() -> Outbox:
        return Outbox(1)

    outbox = asyncio.run(made())
    outbox.put((1, ("text",)))
    outbox.flush()


def test_users_of_one_api_process_have_one_outbox_until_the_last_has_ended() -> None:
    """A reader that ends does not take the outbox from the runs, nor from the next reader."""

    async def test() -> None:
        outboxes = Outboxes(100)
        with outboxes.of("api") as of_run:
            with outboxes.of("api") as of_reader, outboxes.of("other") as other:
                assert of_reader is of_run
                assert other is not of_run
                assert len(outboxes) == 2
            of_run.put((1, ("text",)))
            outboxes.flush()
            with outboxes.of("api") as of_next_reader:
                assert await next_entries(of_next_reader.messages(1.0)) == [(1, ("text",))]
        assert len(outboxes) == 0

    run(test)
