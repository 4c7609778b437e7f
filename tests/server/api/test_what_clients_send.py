"""Values that well-known clients send unasked, and that other servers take."""

from typing import Any

import pytest

from tests.server.api.test_foreign_fields import BOTH, events, post
from tests.server.api.tools.scripted import saying
from tests.servers.processes import Server
from tests.servers.tool_templates import HERMES

HINT = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "a"}


@BOTH
def test_each_event_has_the_usage_of_its_choice(server: Server, route: str) -> None:
    """As vLLM counts: the last event has the counts of all choices, and no choice."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = events(server, route, n=2, temperature=1, seed=5, stream_options=options)
    whole = post(server, route, n=2, temperature=1, seed=5)[1]["usage"]
    counts: dict[int, list[int]] = {0: [], 1: []}
    for event in streamed[:-1]:
        usage = event["usage"]
        assert usage["prompt_tokens"] == whole["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts[event["choices"][0]["index"]].append(usage["completion_tokens"])
    assert all(each == sorted(each) and each[0] == 1 for each in counts.values())
    total = streamed[-1]["usage"]["completion_tokens"]
    assert total == sum(each[-1] for each in counts.values()) == whole["completion_tokens"]


@BOTH
def test_continuous_usage_needs_the_usage(server: Server, route: str) -> None:
    """Alone it changes nothing, as in vLLM."""
    streamed = events(server, route, stream_options={"continuous_usage_stats": True})
    assert not any(each["usage"] for each in streamed)


def test_hints_about_caching_change_nothing() -> None:
    """They stand on parts, messages and tools, as clients of Anthropic's models write them."""
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    plain = {"messages": [USER], "tools": [tool]}
    part = {"type": "text", "text": "a", **HINT}
    hinted = {
        "messages": [{"role": "user", "content": [part], **HINT}],
        "tools": [{**tool, "function": {"name": "f", **HINT}, **HINT}],
    }
    with saying("Yes.", HERMES) as server:
        assert server.post("/tokenize", hinted).json() == server.post("/tokenize", plain).json()
        wrong = {**plain, "tools": [{**tool, "cache_control": 5}]}
        error = server.post("/v1/chat/completions", wrong).json()["error"]
    assert error["param"] == "tools.0.cache_control"


@pytest.mark.parametrize("arguments", ["", " ", "\n\t "])
def test_a_call_without_arguments_has_no_text_of_them(arguments: str) -> None:
    """The prompt is the one of an empty object, on both routes with calls as text."""

    def chat(text: str) -> Any:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
        return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}

    def items(text: str) -> Any:
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
        return {"input": [{"role": "user", "content": "a"}, call], "max_output_tokens": 1}

    with saying("Yes.", HERMES) as server:
        assert (
            server.post("/tokenize", chat(arguments)).json()
            == server.post("/tokenize", chat("{}")).json()
        )
        counts = [
            server.post("/v1/responses", items(text)).json()["usage"]["input_tokens"]
            for text in (arguments, "{}")
        ]
    assert counts[0] == counts[1]
