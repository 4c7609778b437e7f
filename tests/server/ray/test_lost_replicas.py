"""Servers that end while clients read: nothing is lost, and no text differs."""

import asyncio
import os
import signal

import pytest

from tests.server.ray.cluster import (
    Answer,
    actors_of,
    servers_of,
    streams,
    wait_for_replicas,
    wait_until,
)
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server

pytestmark = pytest.mark.ray

NUM_STREAMS, NUM_TOKENS = 32, 150
ROUNDS = int(os.environ.get("REPLICA_ROUNDS", "1"))


@pytest.fixture(scope="module")
def undisturbed(fleet: Server) -> list[Answer]:
    """The answers while no server ends."""
    answers = asyncio.run(streams(fleet, NUM_STREAMS, NUM_TOKENS))
    assert all(each.error is None and each.num_tokens == NUM_TOKENS for each in answers)
    return answers


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_a_lost_server_changes_no_text(
    fleet: Server, undisturbed: list[Answer], name: str, round_: int
) -> None:
    """The streams of a server that ends go on with another one, to the same bytes."""
    wait_for_replicas(fleet, 2)
    servers = servers_of(fleet)
    assert len(servers) == 2
    before = samples_of(fleet)
    victim = servers[round_ % 2]
    answers = asyncio.run(
        streams(
            fleet,
            NUM_STREAMS,
            NUM_TOKENS,
            lambda: os.kill(victim, getattr(signal, name)),
            after_s=0.3 + 0.1 * (round_ % 5),
        )
    )
    assert answers == undisturbed
    after = samples_of(fleet)

    def grown(family: str, **labels: str) -> float:
        return total(after, family, **labels) - total(before, family, **labels)

    assert grown("ropewalk_router_requests_total") == NUM_STREAMS
    num_continued = grown("ropewalk_router_continued_total", outcome="ok")
    if name == "SIGTERM":  # on which a server finishes what it has
        assert num_continued == 0
    else:
        assert num_continued > 0
    # A process that is stopped is killed, and Ray starts another one.
    wait_until(lambda: victim not in servers_of(fleet))


def test_a_server_ends_with_its_actor(fleet: Server, undisturbed: list[Answer]) -> None:
    """Ray starts both again, and streams go on meanwhile."""
    wait_for_replicas(fleet, 2)
    servers, actor = servers_of(fleet), actors_of(fleet)[0]
    killed = lambda: os.kill(actor, signal.SIGKILL)  # noqa: E731
    assert asyncio.run(streams(fleet, NUM_STREAMS, NUM_TOKENS, killed)) == undisturbed
    wait_until(lambda: len(set(servers_of(fleet)) & set(servers)) == 1, 20)
    wait_for_replicas(fleet, 2)
    assert asyncio.run(streams(fleet, NUM_STREAMS, NUM_TOKENS)) == undisturbed
