"""Answers with tools keep the promises of other answers, with the embedded model."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai
import pytest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
    },
    "required": ["city", "days"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {
    "model": "ropewalk-demo",
    "messages": [{"role": "user", "content": "weather?"}],
    "tools": [WEATHER],
    "tool_choice": "required",
    "max_tokens": 70,
}


def told(client: openai.OpenAI, **changes: Any) -> list[tuple[Any, ...]]:
    """All of each choice but the ids of the calls."""
    found = client.chat.completions.create(**{**ASKED, **changes})
    return [
        (
            choice.finish_reason,
            choice.message.content,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls],
        )
        for choice in found.choices
    ]


def streamed(client: openai.OpenAI, **changes: Any) -> tuple[Any, ...]:
    """The same of a stream with one choice."""
    text, calls, reason = "", [], None
    for chunk in client.chat.completions.create(**{**ASKED, **changes}, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for each in choice.delta.tool_calls or ():
            if each.function.name:
                calls.append((each.function.name, ""))
            calls[-1] = calls[-1][0], calls[-1][1] + each.function.arguments
        reason = choice.finish_reason or reason
    return (reason, text or None, calls)


def test_every_call_of_a_real_model_validates(openai_client: openai.OpenAI) -> None:
    """At temperature 1, over several seeds."""
    num_calls = 0
    for choice in told(openai_client, n=6, seed=1, temperature=1):
        for name, arguments in choice[2]:
            assert name == "get_weather"
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(arguments))
            num_calls += 1
    assert num_calls >= 6


def test_the_same_alone_in_company_and_streamed(openai_client: openai.OpenAI) -> None:
    """The choices of `n` have the seeds that follow, cached prefix or not."""
    alone = [told(openai_client, seed=seed)[0] for seed in range(4)]
    assert told(openai_client, seed=0, n=4) == alone
    salted = told(openai_client, seed=2, extra_body={"cache_salt": "other"})
    assert salted == [alone[2]]
    with ThreadPoolExecutor(8) as pool:
        company = [pool.submit(told, openai_client, seed=seed) for seed in range(4)]
        streams = [pool.submit(streamed, openai_client, seed=seed) for seed in range(4)]
        assert [each.result()[0] for each in company] == alone
        assert [each.result() for each in streams] == alone


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4}, {"policy": "grow"}])
def test_a_rope_of_the_request_is_applied(openai_client: openai.OpenAI, rope: Any) -> None:
    """Calls are valid under every method, and the answer tells the method."""
    found = openai_client.chat.completions.create(**ASKED, seed=3, extra_body={"rope": rope})
    choice = found.choices[0]
    assert choice.message.tool_calls
    assert rope.items() <= {**choice.model_extra["rope"], "factor": 4}.items()  # type: ignore[index]


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"maxLength": 8, "title": "Name", "type": "string"},
        "age": {"maximum": 150, "minimum": 0, "title": "Age", "type": "integer"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("strict", "max_tokens"), [(False, 30), (True, 200)])
def test_structured_output_of_llama_index_finds_its_call(
    openai_client: openai.OpenAI, *, strict: bool, max_tokens: int
) -> None:
    """Even if max_tokens cuts it; with `strict`, the arguments are those of the schema."""
    function = {"name": "P", "description": "A person.", "parameters": PERSON, "strict": strict}
    found = openai_client.chat.completions.create(
        model="ropewalk-demo",
        messages=[{"role": "user", "content": "Ann is 7."}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=max_tokens,
        temperature=0,
    ).choices[0]
    assert found.message.content is None
    (call,) = found.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "P"
    assert found.finish_reason == ("tool_calls" if strict else "length")
    if strict:
        assert jsonschema_rs.is_valid(PERSON, json.loads(call.function.arguments))
    else:
        assert call.function.arguments.startswith("{")
