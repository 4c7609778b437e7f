"""Fixtures that tests of the HTTP interface share."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.server.fuzz.breakable import KEY, MODULE, MOST_UNREAD
from tests.servers.processes import Server, running_server


@pytest.fixture(scope="session")
def attacked() -> Iterator[Server]:
    """A server of very short contexts, so that no hostile request generates for long."""
    flags = ("--max-model-len", "64", "--kv-cache-tokens", "8192", "--max-body-bytes", "8388608")
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="session")
def breakable() -> Iterator[Server]:
    """A server whose engine can be stopped and made to fail, and that logs every line.

    Its clients may lag 64 outputs behind.
    """
    flags = ("--open-metrics", "--api-key", KEY, "--shutdown-timeout-seconds", "0")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # other servers have no such bound
            patch.setenv(MOST_UNREAD, "64")
            running = stack.enter_context(running_server(*flags, module=MODULE))
        yield running
