"""Requests to a server over a socket: whole answers, refusals, events of streams, and tokens."""

import json
from typing import Any

import httpx

from tests.servers.processes import Server


def asked(server: Server, route: str, **body: Any) -> Any:
    """Return the answer to a body of /v1/ROUTE."""
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Server, route: str, **body: Any) -> list[Any]:
    """Return the events of a stream."""
    body = {**body, "stream": True}
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]


def refused(server: Server, route: str, **body: Any) -> Any:
    """Return the error of a body that is a client's mistake."""
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def tokens_of(server: Server, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a text."""
    body = {"prompt": text, "add_special_tokens": add_special_tokens}
    found: list[int] = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return found
