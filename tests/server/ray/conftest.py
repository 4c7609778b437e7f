"""Fixtures of the tests with a real Ray cluster (make test-ray)."""

from collections.abc import Iterator

import pytest

from tests.servers.processes import Server, running_server

pytest.importorskip("ray", reason="Ray is an extra: make test-ray")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Server]:
    """`ropewalk serve --replicas 2` on a cluster of its own."""
    flags = ("--threads", "1", "--access-log", "off")
    with running_server("--replicas", "2", *flags) as running:
        yield running
