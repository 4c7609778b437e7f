"""Bodies of /v1/responses that are refused, each with the field's path."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api.tools.scripted import Scripted, saying

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "Hi."}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    """One server for all."""
    with saying("Yes.") as running:
        yield running


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"input": 5}, "input", "must be a string or a list of items"),
        ({"input": [{**USER, "content": 5}]}, "input.0.content", "must be a string or a list"),
        ({"input": [USER, {**USER, "role": "tool"}]}, "input.1.role", "must be user, assistant"),
        (
            {"input": [{**USER, "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input.0.content.0.type",
            "images and files are not supported",
        ),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "stores no items"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "no"}]},
            "input.0.arguments",
            "must be a JSON object as text",
        ),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "input",
            "[1].call_id must name a function_call before it",
        ),
        ({"input": "a", "inputs": 1}, "inputs", "use `input`"),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id", "stores no answers"),
        ({"input": "a", "conversation": {"id": "c"}}, "conversation", "stores no answers"),
        ({"input": "a", "background": True}, "background", "Use `stream`"),
        ({"input": "a", "truncation": "auto"}, "truncation", 'must be "disabled"'),
        ({"input": "a", "top_logprobs": 3}, "top_logprobs", "must be 0"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include.0", "must be"),
        ({"input": "a", "text": {"verbosity": "huge"}}, "text.verbosity", "must be low, medium"),
        (
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}},
            },
            "text.format",
            "the keyword 'type' must be one of object",
        ),
        ({"input": "a", "tools": [{"type": 5}]}, "tools.0.type", "must be a string"),
        ({"input": "a", "tools": [LOOK, LOOK]}, "tools", "Given twice: 'look'"),
        (
            {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "needs `tools` of type function",
        ),
        (
            {"input": "a", "tools": [LOOK], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
            "names a function that `tools` has not: 'g'",
        ),
        (
            {"input": "a", "tools": [LOOK], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "must be function or allowed_tools",
        ),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"input": "a" * 99_000}, "input", "`input` must be at most"),
        ({"input": "a", "model": "no"}, "model", "does not exist"),
    ],
)
def test_a_mistake_is_told_with_its_field(
    server: Scripted, body: Any, param: str, part: str
) -> None:
    """In OpenAI's envelope."""
    answer = server.post("/v1/responses", body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
