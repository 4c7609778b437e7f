"""Tool calls through openai's client, with a model that says what the test wants."""

import json
import re
from typing import Any

import pytest

from ropewalk.server.metrics import TOOL_OUTCOMES
from tests.server.api.tools.scripted import Scripted, saying
from tests.servers.tool_templates import HERMES, LLAMA, MISTRAL, QWEN3_CODER, THINKING


def tool(name: str = "look", *, strict: bool | None = None, **properties: Any) -> Any:
    """A function with a city, or with other properties."""
    schema = {"type": "object", "properties": properties or {"city": {"type": "string"}}}
    function = {"name": name, "description": f"To {name}.", "parameters": schema}
    return {"type": "function", "function": {**function, "strict": strict}}


LOOK, CLOCK = tool(), tool("clock", zone={"type": "integer"})
CALL = '<tool_call>{"name": "look", "arguments": {"city":"Paris"}}</tool_call>'
TIME = '<tool_call>{"name": "clock", "arguments": {"zone":2}}</tool_call>'
BOTH = f"Let me see.\n{CALL}\n{TIME}"


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Names and arguments."""
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]


def accumulated(chunks: list[Any]) -> tuple[str, list[Any], str]:
    """Text, calls and finish reason of a stream, joined as clients join them."""
    text, calls, reason = "", list[Any](), ""
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        text += choice.delta.content or ""
        for piece in choice.delta.tool_calls or ():
            if piece.index == len(calls):
                assert piece.type == "function"
                calls.append([piece.id, piece.function.name, ""])
            else:
                assert (piece.id, piece.type, piece.function.name) == (None, None, None)
            calls[piece.index][2] += piece.function.arguments
        reason = choice.finish_reason or reason
    return text, calls, reason


def outcomes(server: Scripted) -> dict[str, float]:
    """The counter of calls."""
    text = server.service.metrics.render().decode()
    return {
        each: float(re.search(rf'tool_calls_total{{outcome="{each}"}} (\S+)', text)[1])  # type: ignore[index]
        for each in TOOL_OUTCOMES
    }


def test_calls_come_with_the_text_before_them() -> None:
    """Ids have nine characters and differ; the reason is `tool_calls`."""
    with saying(BOTH) as server:
        before = outcomes(server)
        choice = server.ask(tools=[LOOK, CLOCK]).choices[0]
        assert outcomes(server) == {**before, "ok": before["ok"] + 2}
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert calls_of(choice.message) == [("look", {"city": "Paris"}), ("clock", {"zone": 2})]
    ids = [call.id for call in choice.message.tool_calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "look"}}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                },
            },
            "tool_calls",
        ),
    ],
)
def test_the_reason_depends_on_the_choice(choice: Any, reason: str) -> None:
    """A named function ends with `stop`, streamed or not."""
    with saying(CALL) as server:
        asked = {"tools": [LOOK, CLOCK], "tool_choice": choice}
        found = server.ask(**asked).choices[0]
        chunks = server.stream(**asked)
    assert found.finish_reason == accumulated(chunks)[2] == reason
    assert calls_of(found.message) == [("look", {"city": "Paris"})]


def test_a_forced_choice_is_enforced() -> None:
    """Whatever the model wants to say, it calls; the named function and no other."""
    with saying("I would rather talk.") as server:
        for _ in range(2):
            named = {"type": "function", "function": {"name": "clock"}}
            found = server.ask(tools=[LOOK, tool("clock", zone={"enum": [5]})], tool_choice=named)
            assert calls_of(found.choices[0].message)[0][0] == "clock"
        required = server.ask(
            tools=[tool("clock", zone={"enum": [5]})], tool_choice="required", max_tokens=90
        )
        assert calls_of(required.choices[0].message)


def test_an_allowed_tool_is_one_of_several() -> None:
    """A name outside of the subset cannot be written."""
    only_clock = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "clock"}}],
        },
    }
    with saying(CALL) as server:
        found = server.ask(tools=[LOOK, CLOCK], tool_choice=only_clock).choices[0].message
    assert all(name == "clock" for name, _ in calls_of(found))


def test_no_parallel_calls_means_one() -> None:
    """The answer ends behind the first call."""
    with saying(BOTH) as server:
        found = server.ask(tools=[LOOK, CLOCK], parallel_tool_calls=False).choices[0]
    assert calls_of(found.message) == [("look", {"city": "Paris"})]
    assert found.finish_reason == "tool_calls"


def test_choice_none_leaves_the_tools_out() -> None:
    """The prompt is that of a request without tools, and the answer is text."""
    with saying(CALL) as server:
        with_tools = server.ask(tools=[LOOK], tool_choice="none")
        without = server.ask()
    assert with_tools.usage.prompt_tokens == without.usage.prompt_tokens
    assert with_tools.choices[0].message.content == CALL
    assert with_tools.choices[0].finish_reason == "stop"


def test_choice_none_masks_a_special_marker() -> None:
    """A marker that is one token cannot come at all."""
    text = '[TOOL_CALLS] [{"name": "look", "arguments": {"city":"Paris"}}]'
    with saying(text, MISTRAL, special=["[TOOL_CALLS]"]) as server:
        called = server.ask(tools=[LOOK]).choices[0]
        masked = server.ask(tools=[LOOK], tool_choice="none", logprobs=True).choices[0]
    assert calls_of(called.message) == [("look", {"city": "Paris"})]
    assert masked.message.tool_calls is None
    assert "[TOOL_CALLS]" not in [each.token for each in masked.logprobs.content]


def test_a_cut_call_has_its_arguments_up_to_there_and_the_reason_length() -> None:
    """Streamed or not. `length` wins, and half an object is no JSON, so no agent runs it."""
    with saying(BOTH) as server:
        before = outcomes(server)
        found = server.ask(tools=[LOOK, CLOCK], max_tokens=len(BOTH) - 15).choices[0]
        assert outcomes(server) == {
            **before, "ok": before["ok"] + 1, "cut": before["cut"] + 1,
        }  # fmt: skip
        chunks = server.stream(tools=[LOOK, CLOCK], max_tokens=len(BOTH) - 15)
    assert found.finish_reason == accumulated(chunks)[2] == "length"
    told = [(each.function.name, each.function.arguments) for each in found.message.tool_calls]
    assert told == [("look", '{"city": "Paris"}'), ("clock", '{"zone": ')]
    assert [(name, text) for _, name, text in accumulated(chunks)[1]] == told
    assert found.message.content == accumulated(chunks)[0] == "Let me see."


def test_broken_calls_of_free_tools_are_text() -> None:
    """Without `strict` nothing holds the model to JSON, and nothing fails."""
    text = 'So <tool_call>{"name": "look", "arguments": {city}}</tool_call> ended.'
    with saying(text) as server:
        before = outcomes(server)
        found = server.ask(tools=[tool(strict=False)]).choices[0]
        assert outcomes(server) == {**before, "unparsed": before["unparsed"] + 1}
    assert (found.message.content, found.finish_reason) == (text, "stop")


TEMPLATES = [
    (HERMES, [], '<tool_call>\n{"name": "look", "arguments": {"city":"Paris"}}\n</tool_call>'),
    (
        QWEN3_CODER,
        [],
        "<tool_call>\n<function=look>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ),
    (LLAMA, [], '{"name": "look", "parameters": {"city":"Paris"}}'),
    (
        MISTRAL,
        ["[TOOL_CALLS]"],
        '[TOOL_CALLS] [{"name": "look", "arguments": {"city":"Paris"}}]',
    ),
]


@pytest.mark.parametrize(("template", "special", "text"), TEMPLATES)
def test_a_call_its_result_and_the_end(template: str, special: list[str], text: str) -> None:
    """The message with the call goes back as it came, the result after it."""
    with saying(text, template, special) as server:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        called = server.ask(tools=[LOOK], messages=messages).choices[0]
        assert called.finish_reason == "tool_calls"
        assert calls_of(called.message) == [("look", {"city": "Paris"})]
        chunks = server.stream(tools=[LOOK], messages=messages)
        assert [call[1:] for call in accumulated(chunks)[1]] == [["look", '{"city": "Paris"}']]
        call_id = called.message.tool_calls[0].id
        messages += [
            called.message,
            {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": "sun"}]},
        ]
    with saying("Sunny.", template, special) as server:
        ended = server.ask(tools=[LOOK], messages=messages)
        assert ended.choices[0].message.content == "Sunny."
        assert ended.choices[0].finish_reason == "stop"
        dumped = [messages[0], messages[1].model_dump(), messages[2]]
        again = server.ask(tools=[LOOK], messages=dumped)
    assert again.usage.prompt_tokens == ended.usage.prompt_tokens


def test_reasoning_then_a_call() -> None:
    """All three parts, with the tokens of the reasoning counted."""
    call = '<tool_call>\n{"name": "look", "arguments": {"city":"Paris"}}\n</tool_call>'
    text = f"the city is Paris\n</think>\n\nSo:\n{call}"
    for choice in ("auto", "required"):
        said = text if choice == "auto" else text.replace("So:\n", "")
        with saying(said, THINKING) as server:
            found = server.ask(tools=[LOOK], tool_choice=choice)
        message = found.choices[0].message
        assert message.reasoning == message.reasoning_content == "the city is Paris"
        assert calls_of(message) == [("look", {"city": "Paris"})]
        assert found.choices[0].finish_reason == "tool_calls"
        tokens = found.usage.completion_tokens_details.reasoning_tokens
        assert tokens == len("the city is Paris\n</think>")


def test_reasoning_comes_before_json() -> None:
    """The grammar of a `response_format` lets a model think first."""
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}
    with saying("so\n</think>\n\n1", THINKING) as server:
        message = server.ask(response_format=asked).choices[0].message
        assert (message.reasoning, message.content) == ("so", "1")
    with saying("so\n</think>\n\n1", THINKING, reasoning="inline") as server:
        assert server.ask().choices[0].message.content == "so\n</think>\n\n1"
