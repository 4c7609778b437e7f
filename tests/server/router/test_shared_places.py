"""The router reads from the metrics of servers which of them share pages that outlive a cache."""

import asyncio
from typing import Any

import pytest

from ropewalk.server.replicas.text_chunks import TextChunks
from ropewalk.server.router.fleet.fleet import Fleet
from ropewalk.server.router.fleet.server import Server
from ropewalk.server.router.upstream import Target
from ropewalk.server.settings.route_settings import RouteSettings

PLACES = ["a", "a", "b", None]  # of the servers at the ports 1 to 4


def test_pages_are_cheap_for_servers_that_tell_the_same_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others compute them. A place may become known after the first answers, or be gone."""
    asked = TextChunks(1000, 100, tuple(bytes([number]) * 32 for number in range(10)))
    places: list[str | None] = [None, *PLACES[1:]]

    async def answered(server: Server, path: str, _headers: Any = ()) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": []}'
        place = places[server.target.port - 1]
        told = "" if place is None else f'ropewalk_kv_disk_info{{place="{place}"}} 1.0\n'
        size = "ropewalk_kv_cache_tokens 6.0\nropewalk_kv_cache_positions 32000.0\n"
        return 200, f"{size}{told}".encode()

    async def costs() -> list[list[float]]:
        found = []
        fleet = Fleet(RouteSettings(servers=("http://127.0.0.1:1",)))
        for port in range(1, 5):
            server = Server(Target("127.0.0.1", port, f"a:{port}"), None, 1.0)
            fleet.servers[server.name] = server
        for after in (PLACES, [None] * 4, ()):
            for server in fleet.servers.values():
                await fleet._learn(server)
                fleet._note(server, is_ready=True, problem="")
            fleet.choice.routed("first", asked, "http://127.0.0.1:1")
            fleet.choice.ended("first")
            found.append([fleet.choice.cost(asked, name) for name in fleet.servers])
            places[:] = after
        return found

    monkeypatch.setattr(Server, "get", answered)
    # Of 1,000 tokens, the last page is computed in any case.
    apart = [100, 1000, 1000, 1000]
    assert asyncio.run(costs()) == [apart, [100, 190, 1000, 1000], apart]
