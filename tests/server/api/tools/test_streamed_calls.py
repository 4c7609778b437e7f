"""Calls piece by piece, cut calls, and the most calls of an answer, through openai's client."""

import pytest

from tests.server.api.tools.scripted import saying
from tests.server.api.tools.test_tool_calls import (
    BOTH,
    CALL,
    CLOCK,
    LOOK,
    accumulated,
    calls_of,
    outcomes,
    tool,
)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_answer_has_at_most_eight_calls(choice: str) -> None:
    """A model that never stops is stopped, and an equal call is not repeated."""
    zones = [CALL.replace("Paris", f"P{at}") for at in range(10)]
    asked = {"tools": [LOOK], "tool_choice": choice, "max_tokens": 1200}
    with saying("\n".join(zones)) as server:
        found = server.ask(**asked)
        chunks = server.stream(**asked)
    assert [each[1]["city"] for each in calls_of(found.choices[0].message)] == [
        f"P{at}" for at in range(8)
    ]
    assert found.choices[0].finish_reason == "tool_calls"
    assert found.usage.completion_tokens == len("\n".join(zones[:8]))
    assert len(accumulated(chunks)[1]) == 8
    with saying("\n".join([CALL] * 30)) as server:
        before = outcomes(server)
        found = server.ask(**asked)
        assert outcomes(server)["repeated"] - before["repeated"] == 7
    assert calls_of(found.choices[0].message) == [("look", {"city": "Paris"})]
    assert found.usage.completion_tokens == len("\n".join([CALL] * 8))


@pytest.mark.parametrize("strict", [None, False])
def test_a_limit_that_cuts_only_repeated_calls_is_no_reason(*, strict: bool | None) -> None:
    """The client has all of the calls. A limit that cuts anything else is the reason."""
    tools = [tool(strict=strict), tool("clock", strict=strict, zone={"type": "integer"})]
    repeated = "\n".join([CALL] * 3)
    twice = len("\n".join([CALL] * 2))
    with saying(repeated) as server:
        for length in (twice, twice + 1, twice + 10, twice + len(CALL) - 5):
            found = server.ask(tools=tools, max_tokens=length).choices[0]
            assert calls_of(found.message) == [("look", {"city": "Paris"})], length
            assert found.finish_reason == "tool_calls", length
        _, calls, reason = accumulated(server.stream(tools=tools, max_tokens=twice + 10))
        assert (len(calls), reason) == (1, "tool_calls")
        found = server.ask(tools=tools, max_tokens=len(CALL) + 10).choices[0]
        assert found.finish_reason == "length"
    with saying("\n".join([CALL, CALL, CALL.replace("Paris", "Rome")])) as server:
        found = server.ask(tools=tools, max_tokens=twice + len(CALL) - 5).choices[0]
        assert found.finish_reason == "length"


def test_a_stream_of_calls_is_told_as_openai_tells_it() -> None:
    """First the role, then the id and name, the arguments as they come, and an empty delta."""
    with saying(CALL) as server:
        chunks = server.stream(tools=[LOOK])
    told = [
        (chunk.choices[0].delta.model_dump(exclude_unset=True), chunk.choices[0].finish_reason)
        for chunk in chunks
    ]
    assert told[0] == ({"role": "assistant"}, None)
    begun = told[1][0]["tool_calls"][0]
    assert begun == {
        "index": 0,
        "id": begun["id"],
        "type": "function",
        "function": {"name": "look", "arguments": ""},
    }
    pieces = [each[0]["tool_calls"][0] for each in told[2:-1]]
    assert all(each.keys() == {"index", "function"} for each in pieces)
    assert [each["function"]["arguments"] for each in pieces] == [
        "{", '"city": ', '"', *"Paris", '"', "}",
    ]  # fmt: skip
    assert told[-1] == ({}, "tool_calls")


def test_openais_stream_helper_tells_the_end_of_each_call() -> None:
    """Its events carry the pieces, then the parsed arguments."""
    with saying(BOTH) as server:
        events = server.helped(tools=[tool(strict=True), CLOCK])
        whole = server.ask(tools=[tool(strict=True), CLOCK]).choices[0].message
    done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
    assert [(each.name, each.arguments) for each in done] == [
        (each.function.name, each.function.arguments) for each in whole.tool_calls
    ]
    assert done[0].parsed_arguments == {"city": "Paris"}
    deltas = [each for each in events if each.type == "tool_calls.function.arguments.delta"]
    assert "".join(each.arguments_delta for each in deltas) == '{"city": "Paris"}{"zone": 2}'
    assert len(deltas) > 10


def test_a_call_that_a_stop_string_cuts_is_no_reason_to_run_it() -> None:
    """Its arguments are no JSON, and the reason is `stop`, streamed or not."""
    with saying(CALL) as server:
        found = server.ask(tools=[LOOK], stop=["ris"]).choices[0]
        text, calls, reason = accumulated(server.stream(tools=[LOOK], stop=["ris"]))
    assert (found.finish_reason, reason) == ("stop", "stop")
    (call,) = found.message.tool_calls
    assert call.function.arguments == calls[0][2] == '{"city": "Pa'
    assert (found.message.content, text) == (None, "")
