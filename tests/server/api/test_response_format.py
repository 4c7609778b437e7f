"""`response_format` over a real socket, through openai's client, with its refusals."""

import concurrent.futures
import json
import re
import time
from typing import Any

import httpx
import jsonschema_rs
import openai
import pydantic
import pytest

from tests.oracles.schemas import HOSTILE
from tests.server.api.asking import asked as ask
from tests.server.api.asking import refused, tokens_of
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server

MESSAGES: list[Any] = [{"role": "user", "content": "import json"}]
CHAT: dict[str, Any] = {"model": "ropewalk-demo", "messages": MESSAGES, "max_tokens": 200}
# However much the model likes spaces, 200 tokens are enough.
SHORT: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grün", 3, None]}},
    "required": ["colour"],
    "additionalProperties": False,
}
QUICK_S = 5.0  # of /health beside hostile schemas, and beside other work on the machine


def asked(schema: Any, **more: Any) -> Any:
    """A JSON schema as OpenAI's `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def test_the_chat_route_answers_in_json(openai_client: openai.OpenAI) -> None:
    """Several choices come with logprobs, and the same seed repeats them."""
    options: dict[str, Any] = {
        **CHAT, "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 2,
        "response_format": asked(SHORT, strict=True, description="of something"),
    }  # fmt: skip
    found = openai_client.chat.completions.create(**options)
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SHORT, json.loads(choice.message.content or ""))
        assert choice.logprobs is not None
    again = openai_client.chat.completions.create(**options)
    assert [each.message for each in again.choices] == [each.message for each in found.choices]


def test_any_object_is_an_object(openai_client: openai.OpenAI) -> None:
    """Answers that max_tokens cuts are no JSON."""
    choices = openai_client.chat.completions.create(
        **CHAT, n=6, seed=0, response_format={"type": "json_object"}
    ).choices
    finished = [each.message.content or "" for each in choices if each.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


class Colour(pydantic.BaseModel):
    """A part of the requested object."""

    name: str = pydantic.Field(pattern="^[a-z]{1,8}$")
    channel: int = pydantic.Field(ge=0, le=255)


class Palette(pydantic.BaseModel):
    """The requested object, with definitions of its own."""

    title: str | None
    colours: list[Colour] = pydantic.Field(max_length=2)


def test_parse_returns_the_model(openai_client: openai.OpenAI) -> None:
    """The `parse` method of openai's client reads the answer; cut answers are skipped."""
    for seed in range(4):
        try:
            found = openai_client.chat.completions.parse(
                **{**CHAT, "max_tokens": 250}, seed=seed, response_format=Palette
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(found.choices[0].message.parsed, Palette)
        return
    pytest.fail("not one of them came to an end")


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {**asked({}), "type": "json_object"}},
            "response_format.json_schema",
            "needs `type` json_schema. Given: json_object",
        ),
        (
            {"response_format": asked([])},
            "response_format.json_schema.schema",
            "must be an object. Given: []",
        ),
        (
            {"response_format": asked({}, strikt=True)},
            "response_format.json_schema.strikt",
            "is not a field",
        ),
        ({"response_format": asked({"title": "é" * 40_000})}, "response_format", "Given: 80013"),
        (
            {"structured_outputs": {"whitespace_pattern": ""}},
            "structured_outputs",
            "has whitespace of JSON, and needs a form of JSON",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"whitespace_pattern": ".*"},
            },
            "structured_outputs.whitespace_pattern",
            "may contain spaces",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"whitespace_pattern": "", "disable_any_whitespace": False},
            },
            "structured_outputs.disable_any_whitespace",
            "exclude each other",
        ),
    ],
)
def test_a_format_that_cannot_be_served_is_refused_by_name(
    server: Server, change: dict[str, Any], param: str, message: str
) -> None:
    """The refusal comes in OpenAI's envelope."""
    error = refused(server, "chat/completions", messages=MESSAGES, **change)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("asked_whitespace", "widest"),
    [
        (None, 1),
        ({"disable_any_whitespace": True}, 0),
        ({"disable_any_whitespace": False}, 32),
        ({"whitespace_pattern": r"\n? {0,2}"}, 3),
    ],
)
def test_a_request_chooses_its_whitespace(
    server: Server, asked_whitespace: dict[str, Any] | None, widest: int
) -> None:
    """Answers are compact by default, and vLLM's field allows more or less."""
    tokens = tokens_of(server, "\n  \n    ", add_special_tokens=False)
    body: dict[str, Any] = {
        "prompt": "import json", "max_tokens": 200, "temperature": 0,
        "logit_bias": {str(token): 50 for token in tokens},
        "response_format": asked({**SHORT, "properties": {"colour": {"const": 3}}}),
    }  # fmt: skip
    if asked_whitespace is not None:
        body["structured_outputs"] = asked_whitespace
    found = ask(server, "completions", **body)["choices"][0]
    assert (found["finish_reason"], json.loads(found["text"])) == ("stop", {"colour": 3})
    lengths = [len(run) for run in re.findall(r"\s+", found["text"])]
    assert max(lengths, default=0) == widest


SET = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
FUNCTION = {"name": "f", "strict": True}
_CHAT = {"messages": MESSAGES, "max_tokens": 8}
# Each field that has a schema: (route, body, the field in the error).
WITH_SCHEMA: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {**_CHAT, "response_format": asked(SET)}, "response_format"),
    ("chat/completions", {**_CHAT, "structured_outputs": {"json": SET}}, "structured_outputs"),
    ("completions", {"prompt": "a", "guided_json": json.dumps(SET)}, "guided_json"),
    ("responses", {"input": "a", "text": {"format": {
        "type": "json_schema", "name": "a", "schema": SET}}}, "text.format"),
    ("messages", {**_CHAT, "model": "ropewalk-demo", "output_config": {"format": {
        "type": "json_schema", "schema": SET}}}, "output_config.format"),
    ("chat/completions", {**_CHAT, "tools": [
        {"type": "function", "function": {**FUNCTION, "parameters": SET}}]},
     "tools.0.function.parameters"),
    ("responses", {"input": "a", "tools": [
        {**FUNCTION, "type": "function", "parameters": SET}]}, "tools.0.parameters"),
    ("messages", {**_CHAT, "model": "ropewalk-demo", "tools": [
        {**FUNCTION, "input_schema": SET}]}, "tools.0.input_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "param"), WITH_SCHEMA)
def test_every_field_with_a_schema_refuses_keywords_by_name(
    server: Server, route: str, body: dict[str, Any], param: str
) -> None:
    """The error has the field, the keyword and its place."""
    error = refused(server, route, **body)
    assert error["param"] == param
    assert "the keyword 'uniqueItems' is not supported (at '$.properties.a')" in error["message"]
    assert f"`{param.partition('.0')[0]}" in error["message"]
    if ".0" in param:
        assert '; with "strict": false' in error["message"], "how such a tool is served"


# It compiles, and the matcher gives up in the midst of the answer.
LATE = {"type": "string", "pattern": "^(a?){500}a{500}$"}
LATE_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "response_format",
        {"messages": MESSAGES, "max_tokens": 40, "response_format": asked(LATE)},
    ),
    "/v1/responses": (
        "text.format",
        {
            "input": "a",
            "max_output_tokens": 40,
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": LATE}},
        },
    ),
    "/v1/messages": (
        "output_config.format",
        {
            "model": "ropewalk-demo",
            "messages": MESSAGES,
            "max_tokens": 40,
            "output_config": {"format": {"type": "json_schema", "schema": LATE}},
        },
    ),
}


@pytest.mark.parametrize("path", LATE_BODIES)
def test_a_grammar_that_fails_late_is_the_clients_mistake(server: Server, path: str) -> None:
    """The answer is no 5xx, which a proxy would send to the next server; nor is a stream's end."""
    field, body = LATE_BODIES[path]
    refused = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert error["message"].startswith(f"`{field}`: the grammar's matcher failed: lexer error: too")
    streamed = httpx.post(f"{server.url}{path}", json={**body, "stream": True}, timeout=60).text
    assert error["message"] in streamed
    assert ("invalid_prompt" if path == "/v1/responses" else "invalid_request_error") in streamed
    assert "server_error" not in streamed
    assert total(samples_of(server), "ropewalk_requests_total", finish_reason="error") == 0


@pytest.mark.alone  # it is about seconds
def test_hostile_schemas_do_not_keep_others_waiting(server: Server) -> None:
    """All schemas come at once, and /health is answered quickly meanwhile."""

    def ask(schema: Any) -> int:
        body = {"messages": MESSAGES, "max_tokens": 20, "response_format": asked(schema)}
        url = f"{server.url}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=60).status_code

    slowest = 0.0
    with concurrent.futures.ThreadPoolExecutor(len(HOSTILE)) as pool:
        answers = [pool.submit(ask, schema) for schema in HOSTILE.values()]
        while not all(each.done() for each in answers):
            began = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.02)
    # One of them is larger than a body may be, and then than the longest context.
    assert {each.result() for each in answers} == {200, 400}
    assert slowest < QUICK_S
