"""A client of the server that all tests share; behind replicas, some of the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.sampling import not_drawn_files
from tests.servers.openai_client import openai_client_of
from tests.servers.processes import REPLICAS, Server

_ALWAYS_BEHIND_REPLICAS = ("test_completions.py", "test_chat.py", "test_stop_logprobs.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """With `TEST_REPLICAS`, leave out the files that are not drawn."""
    if REPLICAS is None:
        return
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    left_out = not_drawn_files(here, _ALWAYS_BEHIND_REPLICAS)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session")
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client, connected to the shared server."""
    with openai_client_of(server) as client:
        yield client
