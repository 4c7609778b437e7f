"""OpenAI's own client of a server under test."""

import openai

from tests.servers.processes import Server


def openai_client_of(server: Server) -> openai.OpenAI:
    """Connect to a server without retries, so that errors show."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
