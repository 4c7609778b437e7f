"""Answers of /v1/responses and /v1/messages keep the promises of chats, with the embedded model."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.api.asking import asked
from tests.servers.processes import Server

MESSAGES: list[Any] = [{"role": "user", "content": "import os\nimport sys\n"}]
OPTIONS: dict[str, Any] = {"temperature": 1, "seed": 5}


def said(server: Server, api: str, **changes: Any) -> tuple[str, Any]:
    """The text of an answer and its rope."""
    limit = {"max_output_tokens" if api == "responses" else "max_tokens": 24}
    given = {"input" if api == "responses" else "messages": MESSAGES}
    route = "chat/completions" if api == "chat" else api
    found = asked(server, route, **given, **limit, **OPTIONS, **changes)
    if api == "chat":
        return found["choices"][0]["message"]["content"], found["choices"][0]["rope"]
    content = found["content"] if api == "messages" else found["output"][0]["content"]
    return content[0]["text"], found["rope"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope": {"rope_type": "linear", "factor": 4}}, {"rope": {"policy": "grow"}}],
)
def test_all_routes_say_the_same(server: Server, changes: Any) -> None:
    """Same prompt, seed and rope: the same answer, alone or in company."""
    apis = ("chat", "responses", "messages")
    chat, *others = [said(server, api, **changes) for api in apis]
    assert others == [chat, chat]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda api: said(server, api, **changes), apis * 2))
    assert together == [chat] * 6
    salted = said(server, "messages", cache_salt="other", **changes)
    assert salted == chat


def test_a_context_that_is_too_long_is_refused(
    server: Server, openai_client: openai.OpenAI
) -> None:
    """With the field and the numbers of the route."""
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.responses.create(model="ropewalk-demo", input="import os\n" * 1500)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "input"
    long = [{"role": "user", "content": "import os\n" * 1500}]
    answer = httpx.post(f"{server.url}/v1/messages", json={"messages": long, "max_tokens": 9})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 2048)


def test_errors_before_the_route_have_the_envelope_of_the_path(server: Server) -> None:
    """Unknown paths, methods and bodies that are no JSON."""
    paths = (("/v1/messages/x", 404, "not_found_error"), ("/v1/messages", 400, "invalid_request"))
    for path, status, kind in paths:
        answer = httpx.post(f"{server.url}{path}", content=b"{")
        assert answer.status_code == status
        assert answer.json()["error"]["type"].startswith(kind)
        assert answer.json()["type"] == "error"
    other = httpx.post(f"{server.url}/v1/messages_x", content=b"{").json()
    assert "type" not in other
