"""Mixed load for a while, with a server killed again and again."""

import asyncio
import os
import random
import signal
import time

import httpx
import pytest

from tests.server.ray.cluster import (
    Answer,
    body,
    servers_of,
    stream,
    wait_for_replicas,
)
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, rss_mib
from tests.servers.progress import say

pytestmark = [pytest.mark.ray, pytest.mark.long]

SECONDS = float(os.environ.get("REPLICA_SOAK_SECONDS", "45"))
KILL_EVERY_S = float(os.environ.get("REPLICA_KILL_SECONDS", "20"))
NUM_CLIENTS = 12


def test_counters_are_what_clients_saw_and_memory_is_flat(fleet: Server) -> None:
    """A kill a minute loses no request, and the router does not grow."""
    wait_for_replicas(fleet, 2)
    asyncio.run(_load(fleet, 8, kills=False))  # what is allocated once is allocated
    before, before_mib = samples_of(fleet), rss_mib(fleet.pid)
    answers, num_kills = asyncio.run(_load(fleet, SECONDS, kills=True))
    after = samples_of(fleet)
    grown_mib = rss_mib(fleet.pid) - before_mib

    def difference(family: str) -> float:
        return total(after, family) - total(before, family)

    say(f"{len(answers)} answers, {num_kills} kills, {grown_mib:.1f} MiB more in the router")
    assert [each.error for each in answers if each.error] == []
    assert all(each.num_done == 1 for each in answers)
    assert num_kills >= 1
    assert difference("ropewalk_router_requests_total") == len(answers)
    assert total(after, "ropewalk_requests_running") == 0
    assert grown_mib < 48


async def _load(server: Server, seconds: float, *, kills: bool) -> tuple[list[Answer], int]:
    """Answers of clients that ask one after the other, and the number of servers killed."""
    deadline = time.monotonic() + seconds
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def ask(number: int) -> None:
            generator = random.Random(number)
            while time.monotonic() < deadline:
                request = body(generator.randrange(10_000), generator.choice([5, 40, 200]))
                answers.append(await stream(client, server.url, request))

        async def kill() -> int:
            num_kills = 0
            while time.monotonic() + KILL_EVERY_S / 2 < deadline:
                servers = servers_of(server)
                if len(servers) == 2:  # the last one has been replaced
                    os.kill(servers[num_kills % 2], signal.SIGKILL)
                    num_kills += 1
                await asyncio.sleep(KILL_EVERY_S)
            return num_kills

        killing = asyncio.ensure_future(kill()) if kills else None
        await asyncio.gather(*(ask(number) for number in range(NUM_CLIENTS)))
        return answers, 0 if killing is None else await killing
