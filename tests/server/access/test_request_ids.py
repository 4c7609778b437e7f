"""`request_id` of a body: in the answer's id, in the header and in the log."""

import json
from typing import Any

import httpx
import pytest

from tests.server.access.log_reader import line_of
from tests.servers.processes import Server

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a", "max_tokens": 2},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
PREFIXES = {"completions": "cmpl-", "chat/completions": "chatcmpl-"}


def post(server: Server, route: str, headers: Any = None, **fields: Any) -> httpx.Response:
    """The answer to a small request."""
    body = {**BODIES[route], **fields}
    return httpx.post(f"{server.url}/v1/{route}", json=body, headers=headers, timeout=30)


@pytest.mark.parametrize("route", list(BODIES))
def test_the_answers_id_ends_with_it(server: Server, route: str) -> None:
    """As in vLLM; two answers may have the same one, and streams have it in each event."""
    expected = f"{PREFIXES[route]}order/42"
    for _ in range(2):
        answer = post(server, route, request_id="order/42", n=2)
        assert answer.json()["id"] == expected
        assert answer.headers["x-request-id"] == "order/42"
    streamed = post(server, route, request_id="order/42", stream=True)
    lines = [each for each in streamed.text.splitlines() if each.startswith("data: {")]
    assert {json.loads(each[6:])["id"] for each in lines} == {expected}
    assert streamed.headers["x-request-id"] == "order/42"


def test_the_log_has_it(server: Server) -> None:
    """So a line leads to the answer."""
    post(server, "completions", request_id='a="b"')
    assert line_of(server, 'a="b"')["status"] == 200


def test_the_header_names_the_request_and_the_body_the_answer(server: Server) -> None:
    """A proxy that draws ids finds its own in the header, and so in the log."""
    answer = post(server, "completions", {"X-Request-Id": "proxy-1"}, request_id="b")
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("proxy-1", "cmpl-b")
    invalid = post(server, "completions", {"X-Request-Id": "a b"}, request_id="b")
    assert invalid.headers["x-request-id"] == "b"


def test_a_refused_request_has_its_id(server: Server) -> None:
    """That is when it is looked for."""
    refused = post(server, "completions", request_id="b", prompt="a" * 100, max_tokens=10**6)
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "b")


@pytest.mark.parametrize("wrong", ["", "a b", "é", "x" * 129, 5])
def test_other_characters_are_refused(server: Server, wrong: Any) -> None:
    """They would be text of a client in a header and a log."""
    error = post(server, "completions", request_id=wrong).json()["error"]
    assert error["param"] == "request_id"
