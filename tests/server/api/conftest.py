"""A client of the server that all tests share; behind replicas, some of the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.servers.openai_client import openai_client_of
from tests.servers.processes import REPLICAS, Server

_BEHIND_REPLICAS = {
    *("test_completions.py", "test_chat.py", "test_stop_logprobs.py"),
    *("test_messages.py", "test_responses.py"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """With `TEST_REPLICAS`, run one file of each API, because each reads the same answers."""
    if REPLICAS is None:
        return
    here = Path(__file__).parent
    left_out = {
        item
        for item in items
        if item.path.is_relative_to(here) and item.path.name not in _BEHIND_REPLICAS
    }
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session")
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client, connected to the shared server."""
    with openai_client_of(server) as client:
        yield client
