"""The servers that a router knows: names that resolve anew, and versions that replace another."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import structlog

from ropewalk.server.replicas.text_chunks import TextChunks
from ropewalk.server.router.fleet import fleet as fleet_module
from ropewalk.server.router.fleet.fleet import Fleet
from ropewalk.server.router.upstream import Exchange, LostError, Pool, Target
from ropewalk.server.settings.route_settings import RouteSettings
from tests.server.router.other_server import OtherServer, other_server

NOTHING = TextChunks(0, 32, ())


@asynccontextmanager
async def watched(*urls: str, silence_s: float = 5.0) -> AsyncIterator[Fleet]:
    """A fleet that looks every twentieth of a second."""
    fleet = Fleet(
        RouteSettings(
            servers=urls,
            check_seconds=0.05,
            silence_seconds=silence_s,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "_RESOLVE_S", 0.05)
        running = asyncio.ensure_future(fleet.run())
        try:
            yield fleet
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # what changes has no event
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]  # a coroutine function


@pytest.mark.skipif(sys.platform != "linux", reason="others have one address of loopback")
def test_a_name_stands_for_the_addresses_that_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes, one goes, and a look-up that fails changes nothing."""
    hosts = ["127.0.0.1"]
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "servers.test":
            return real(host, port, *args, **options)
        if not hosts:
            raise socket.gaierror("no answer")
        kind = socket.SOCK_STREAM
        six = (socket.AF_INET6, kind, 6, "", ("::1", port, 0, 0))
        return [six, *((socket.AF_INET, kind, 6, "", (each, port)) for each in hosts)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def test() -> None:
        with other_server() as first, other_server("127.0.0.2", first.port) as second:
            async with watched(f"http://servers.test:{first.port}") as fleet:
                await until(lambda: [each.name for each in fleet.usable] == [first.url])
                hosts.append("127.0.0.2")
                await until(lambda: {*fleet.choice.replicas} == {first.url, second.url})
                hosts.remove("127.0.0.1")
                await until(lambda: set(fleet.servers) == {second.url})
                assert fleet.choice.replicas == (second.url,)
                hosts.clear()
                await asyncio.sleep(0.2)
                assert fleet.choice.replicas == (second.url,)

    run(test)


def listing(server: OtherServer, name: str, created: int = 0) -> None:
    server.models = {"object": "list", "data": [{"id": name, "created": created}]}


def test_the_majority_decides_what_is_served() -> None:
    """A newer version takes over when more servers have it; times of the start do not count."""

    async def test() -> None:
        with other_server() as first, other_server() as second, other_server() as third:
            servers = (first, second, third)
            for number, each in enumerate(servers):
                listing(each, "old", number)
            async with watched(*(each.url for each in servers)) as fleet:
                await until(lambda: len(fleet.usable) == 3)
                for number, each in enumerate(servers, 1):
                    # A process that is replaced is not ready for a while.
                    each.is_ready = False
                    await until(lambda url=each.url: fleet.states()[url] != "ready")
                    listing(each, "new")
                    fleet.servers[each.url].facts = None
                    each.is_ready = True
                    expected = {each.url for each in servers[:number]}
                    if number == 1:
                        expected = {each.url for each in servers[1:]}
                    await until(lambda wanted=expected: {*fleet.choice.replicas} == wanted)
                assert len(fleet.usable) == 3

    run(test)


def test_a_doubtful_server_keeps_its_vote_until_it_is_asked() -> None:
    """Else one broken connection would change over to the other version."""

    async def test() -> None:
        with other_server() as first, other_server() as second:
            listing(first, "old")
            async with watched(first.url) as fleet:
                await until(lambda: bool(fleet.usable))
                listing(second, "new")
                host, _, port = second.url.removeprefix("http://").partition(":")
                fleet.tell([Target(host, int(port), f"{host}:{port}")])
                await until(lambda: fleet.refused()["listing"] == 1)
                agreed = fleet.agreed
                fleet.doubt(fleet.servers[first.url], "a connection broke")
                assert fleet.agreed == agreed
                assert not fleet.usable
                await until(lambda: [each.name for each in fleet.usable] == [first.url])
                first.is_ready = False
                await until(lambda: [each.name for each in fleet.usable] == [second.url])

    run(test)


def test_without_a_server_a_request_waits_and_is_told() -> None:
    """One that comes meanwhile takes it."""

    async def test() -> None:
        with other_server() as server:
            server.is_ready = False
            async with watched(server.url) as fleet:
                assert await fleet.pick("a", NOTHING, lambda _: False, 0.1) is None
                waiting = asyncio.ensure_future(fleet.pick("b", NOTHING, lambda _: False, 0.1))
                await asyncio.sleep(0)
                server.is_ready = True
                await until(lambda: bool(fleet.usable))
                found = await fleet.pick("c", NOTHING, lambda _: False, 0.1)
                assert found is not None
                assert found.name == server.url
                waited = await waiting
                assert waited is None or waited.name == server.url
                assert fleet.choice.num_open == 1 + (waited is not None)

    run(test)


def test_an_address_that_does_not_resolve_leaves_the_others() -> None:
    """Its log line comes once; a name with an empty label is no name at all."""

    async def test() -> None:
        with other_server() as server, structlog.testing.capture_logs() as lines:
            async with watched("http://a..b", server.url) as fleet:
                await until(lambda: [each.name for each in fleet.usable] == [server.url])
                await asyncio.sleep(0.2)  # several look-ups
        told = [each["address"] for each in lines if each["event"] == "name_not_resolved"]
        assert told == ["http://a..b"]

    run(test)


def test_streams_of_a_server_that_accepts_no_connection_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a network that is gone, an open connection stays silent and does not break."""
    lost: list[str] = []

    async def refuse(*_: Any) -> Exchange:
        raise LostError("it did not accept a connection", is_unsent=True)

    async def test() -> None:
        with other_server() as server:
            async with watched(server.url, silence_s=0.3) as fleet:
                await until(lambda: bool(fleet.usable))
                monkeypatch.setattr(Pool, "lose", lambda _, why: lost.append(why))
                monkeypatch.setattr(Pool, "request", refuse)
                await until(lambda: bool(lost))
                assert not fleet.usable

    run(test)


def test_a_server_whose_fingerprint_is_not_there_yet_is_told_of() -> None:
    """Its hash of large weights takes longer than a check waits; afterwards it takes requests."""

    async def test() -> None:
        with other_server() as server, structlog.testing.capture_logs() as lines:
            server.is_hashing = True
            async with watched(server.url, silence_s=0.2) as fleet:
                await until(lambda: fleet.refused()["pending"] == 1)
                await asyncio.sleep(0.5)
                assert not fleet.usable
                server.is_hashing = False
                await until(lambda: bool(fleet.usable))
                assert not any(fleet.refused().values())
        told = [each["why"] for each in lines if each["event"] == "server_refused"]
        assert len(told) == 1
        assert "/v1/models does not answer" in told[0]

    run(test)


def test_a_check_that_fails_by_itself_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fleet._learn
    num_failed = 0

    async def learn(fleet: Fleet, server: Any) -> None:
        nonlocal num_failed
        num_failed += 1
        if num_failed == 1:
            raise ZeroDivisionError
        await real(fleet, server)

    monkeypatch.setattr(Fleet, "_learn", learn)

    async def test() -> None:
        with other_server() as server:
            async with watched(server.url) as fleet:
                await until(lambda: bool(fleet.usable))
        assert num_failed > 1

    run(test)
