"""Tools that are refused: one sentence each, which names the field."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.oracles.schemas import HOSTILE
from tests.server.api.tools.scripted import Scripted, saying


@pytest.fixture(scope="module")
def quiet() -> Iterator[Scripted]:
    """A server whose model says a word."""
    with saying("Yes.") as server:
        yield server


def function(**changes: Any) -> Any:
    """A tool called f."""
    return {"type": "function", "function": {"name": "f", **changes}}


def calling(arguments: str) -> Any:
    """An answer that calls f with a text of arguments."""
    return {"role": "assistant", "tool_calls": [{**CALL, "function": _named("f", arguments)}]}


def _named(name: str, arguments: str) -> Any:
    return {"name": name, "arguments": arguments}


def chosen(kind: str, **fields: Any) -> Any:
    """One tool, and a choice of a kind."""
    return {"tools": [F], "tool_choice": {"type": kind, **fields}}


F = function()
CALL = {"id": "a", "type": "function", "function": _named("f", "{}")}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "c"}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
ARGUMENTS = "messages.1.tool_calls.0.function.arguments"
PARAMETERS = "tools.0.function.parameters"
RESULT_ID = "messages.1.tool_call_id"
NOT_AN_OBJECT = "must be a JSON object as text"


def said(*messages: Any) -> Any:
    """Messages after one of the user."""
    return {"messages": [{"role": "user", "content": "a"}, *messages]}


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "must be function; custom"),
        ({"tools": [function(name="a b")]}, "tools.0.function.name", "must match the pattern"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "must have one form at most. Given: 2",
        ),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "together with `guided_json`"),
        ({"tools": [F, F]}, "tools", "must have each name once. Given twice: 'f'"),
        ({"tools": [F] * 129}, "tools", "must have at most 128 items. Given: 129"),
        ({"tool_choice": "required"}, "tool_choice", "of required needs `tools`"),
        ({"tools": [F], "tool_choice": "maybe"}, "tool_choice", "must be none, auto or required"),
        (chosen("function", function={"name": "g"}), "tool_choice", "`tools` has not: 'g'"),
        (chosen("allowed_tools", allowed_tools=ALLOWED), "tool_choice", "`tools` has not: 'g'"),
        (chosen("custom"), "tool_choice.type", "must be function or allowed_tools"),
        (chosen("function"), "tool_choice.function", "is missing: `type` is function"),
        ({"tools": [F], "ignore_eos": True}, "ignore_eos", "cannot be true together with `tools`"),
        (
            {"tools": [F, function(name="g", parameters={"type": "array"})]},
            "tools.1.function.parameters",
            "the type of `parameters` must be object (function 'g'",
        ),
        (
            {"tools": [function(parameters={"title": "x" * 70_000})]},
            PARAMETERS,
            "must be at most 65536 bytes",
        ),
        (
            {
                "tools": [
                    function(name=f"f{at}", parameters={"title": "x" * 9000}) for at in range(9)
                ]
            },
            "tools",
            "must have schemas of at most 65536 bytes together",
        ),
        (said(RESULT), RESULT_ID, 'must name a call of a message before it. Given: "a"'),
        (said({"role": "assistant"}), "messages.1.content", "is missing"),
        (said({"role": "user", "content": None}), "messages.1.content", "must be a string or"),
        (
            said({"role": "user", "content": "a", "tool_calls": [CALL]}),
            "messages.1.tool_calls",
            "needs the role assistant",
        ),
        (
            said({"role": "assistant", "content": "a", "tool_call_id": "a"}),
            RESULT_ID,
            "needs the role tool",
        ),
        *((said(calling(text)), ARGUMENTS, NOT_AN_OBJECT) for text in ("{", "[" * 5000)),
        (said(calling('{"a": NaN}')), ARGUMENTS, NOT_AN_OBJECT),
        (said(calling("[]")), ARGUMENTS, f'{NOT_AN_OBJECT}. Given: "[]"'),
        (said(calling('{"a": {"b": 1, "b": 1}}')), ARGUMENTS, 'name once. Given twice: "b"'),
        (said(calling('{"a": ' + "1" * 5000 + "}")), ARGUMENTS, "numbers of at most 4300 digits."),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "must have at most 512 characters"),
        (
            said(CALLS, RESULT, RESULT),
            "messages.3.tool_call_id",
            'names a call that has a result already. Given: "a"',
        ),
        (
            said({"role": "assistant", "tool_calls": [CALL, CALL]}),
            "messages.1.tool_calls.1.id",
            'must not be that of an earlier call without a result. Given: "a"',
        ),
        (
            said({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}),
            "messages.1.reasoning",
            "differs from `reasoning_content`, give one",
        ),
        (said({"role": "robot", "content": "a"}), "messages.1.role", 'Given: "robot"'),
        ({"prediction": {"type": "edit", "content": "x"}}, "prediction.type", "must be content"),
        ({"prediction": {"type": "content"}}, "prediction.content", "is missing"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content", "at least 1"),
        (
            {"prediction": {"type": "content", "content": "a" * 100_000}},
            "prediction",
            "must be at most",
        ),
        ({"verbosity": "low"}, "verbosity", 'must be "medium", or left out. Given: "low"'),
        ({"service_tier": "flex"}, "service_tier", 'must be "auto" or "default", or left out'),
        ({"modalities": ["text", "audio"]}, "modalities", 'must be ["text"], or left out. Given'),
        ({"functions": [{"name": "f"}]}, "functions", "is not supported, use `tools`"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "must be none, minimal, low"),
    ],
)
def test_a_refusal_names_the_field(
    quiet: Scripted, change: dict[str, Any], param: str, told: str
) -> None:
    """The status is 400."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **change}
    answer = quiet.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert told in error["message"]
    assert error["param"] == param


def nested(depth: int) -> str:
    """An object that is so deep, as text."""
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def deep_bodies(depth: int) -> dict[str, Any]:
    """Large bodies, which a thread validates, by the field whose text is so deep."""
    text, user = nested(depth), {"role": "user", "content": "a" * 40_000}
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
    result = {"type": "function_call_output", "call_id": "a", "output": "b"}
    chat, calling = "/v1/chat/completions", {"role": "assistant", "tool_calls": [call]}
    return {
        "messages.1.tool_calls.0.function.arguments": (chat, {"messages": [user, calling]}),
        "guided_json": (chat, {"messages": [user], "guided_json": text}),
        "input.1.arguments": ("/v1/responses", {"input": [user, item, result]}),
    }


@pytest.mark.parametrize("param", deep_bodies(1))
@pytest.mark.parametrize("depth", [65, 960])
def test_a_text_of_json_has_a_limit_of_its_depth(quiet: Scripted, param: str, depth: int) -> None:
    """A deep one once failed on the event loop, which has less of the stack left than a thread."""
    answer = quiet.post(*deep_bodies(depth)[param])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], "nested at most 64 deep" in error["message"]) == (param, True), error
    at_limit = quiet.post(*deep_bodies(64)[param]).json()["error"]  # of its content, too long
    assert "nested" not in at_limit["message"]


def test_a_type_of_null_is_a_type_left_out(quiet: Scripted) -> None:
    """Some clients send null for every field that they do not set."""
    said_by = [
        said({"role": "assistant", "tool_calls": [{**CALL, **kind}]})
        for kind in ({}, {"type": None}, {"type": "function"})
    ]
    prompts = [quiet.post("/tokenize", each).json() for each in said_by]
    assert prompts[0]["tokens"]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_hostile_schema_is_refused_by_its_function(quiet: Scripted) -> None:
    """Schemas of tools go through the same trial as a `response_format`."""
    parameters = {"type": "object", "properties": {"a": HOSTILE["a product"]}}
    tools = [F, function(name="hostile", parameters=parameters)]
    answer = quiet.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    )
    assert answer.status_code == 400
    assert "(function 'hostile'" in answer.json()["error"]["message"]


def test_an_operator_may_serve_no_tools() -> None:
    """The field is then refused, not ignored."""
    with saying("Yes.", tool_format="none") as server:
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [F]}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert "not served (tool_format is none)" in answer.json()["error"]["message"]
        assert server.ask().choices[0].message.content == "Yes."
