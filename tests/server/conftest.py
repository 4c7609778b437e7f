"""What tests of the HTTP interface share."""

from collections.abc import Iterator

import pytest

from tests.processes import Server, running_server


@pytest.fixture(scope="session")
def attacked() -> Iterator[Server]:
    """A server of very short contexts, so that no hostile request generates for long."""
    with running_server("--max-model-len", "64", "--kv-cache-tokens", "8192") as running:
        yield running
