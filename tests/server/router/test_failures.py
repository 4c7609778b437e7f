"""Servers that a network cuts off while streams run."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.doubles.waiting import wait_until
from tests.server.router.in_namespace import MODULE, VARIABLE
from tests.server.router.test_route import (
    FLAGS,
    HASTY,
    PATHS,
    alone,
    begun,
    body_for,
    events,
    metric,
    routed,
)
from tests.servers.processes import running_server, without_replicas

pytestmark = without_replicas


def ip(*arguments: str) -> None:
    """Run iproute2's command. Raises CalledProcessError."""
    program = shutil.which("ip")
    assert program is not None
    subprocess.run([program, *arguments], check=True, capture_output=True)


@contextmanager
def namespace() -> Iterator[tuple[str, str, str]]:
    """A network namespace behind a pair of interfaces: its name, its interface and its address.

    The test is skipped where none can be made.
    """
    number = uuid.uuid4().int
    name, host, inside = (f"rw{each}{number % 0xFFFFFF:06x}" for each in ("n", "h", "i"))
    subnet = f"198.{18 + number % 2}.{number // 2 % 256}"  # for tests of networks (RFC 2544)
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made: {error.stderr!r}")
    try:
        try:
            ip("link", "add", host, "type", "veth", "peer", "name", inside, "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no pair of interfaces can be made: {error.stderr!r}")
        ip("addr", "add", f"{subnet}.1/30", "dev", host)
        ip("link", "set", host, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{subnet}.2/30", "dev", inside)
        ip("-n", name, "link", "set", inside, "up")
        yield name, inside, f"{subnet}.2"
    finally:
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", host)
        ip("netns", "del", name)


@pytest.mark.long
def test_streams_go_on_when_the_network_drops_all_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection breaks, and the server runs on. It is chosen again when packets pass."""
    with namespace() as (name, interface, address), running_server(*FLAGS) as near:
        monkeypatch.setenv(VARIABLE, name)
        with (
            running_server(*FLAGS, "--host", address, module=MODULE) as far,
            routed(near.url, far.url, flags=HASTY, num_ready=2) as url,
        ):
            asked = [(path, body_for(path, 5, 1000)) for path in PATHS]
            expected = alone(near, asked)
            readers = begun(url, asked * 2)
            ip("-n", name, "link", "set", interface, "down")
            try:
                for each in readers:
                    each.join(60)
                wait_until(lambda: metric(url, 'servers{state="ready"}') == 1)
            finally:
                ip("-n", name, "link", "set", interface, "up")
            for each, wanted in zip(readers, expected * 2, strict=True):
                assert events(each.data) == wanted
            assert metric(url, 'continued_total{outcome="ok"}') > 0
            assert metric(url, 'continued_total{outcome="diverged"}') == 0
            wait_until(lambda: metric(url, 'servers{state="ready"}') == 2)
