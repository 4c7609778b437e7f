"""A client of the server that all tests share."""

from collections.abc import Iterator

import openai
import pytest

from tests.openai_client import openai_client_of
from tests.processes import Server


@pytest.fixture(scope="session")
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client, connected to the shared server."""
    with openai_client_of(server) as client:
        yield client
