"""/v1/responses through openai's client, with a model that says what the test wants."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.api.tools.scripted import Scripted, saying
from tests.servers.tool_templates import THINKING

LOOK = {
    "type": "function",
    "name": "look",
    "description": "To look.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>{"name": "look", "arguments": {"city":"Paris"}}</tool_call>'
THOUGHT = "So.\n</think>\n\nLet me.\n" + CALL.replace(">{", ">\n{").replace("}<", "}\n<")
ASKED: dict[str, Any] = {"model": "ropewalk-demo", "input": "Hi.", "temperature": 0}


def with_client(server: Scripted, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """The result of a use of openai's client."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(
            base_url="http://scripted/v1", api_key="none", max_retries=0, http_client=server.http()
        ) as client:
            return await use(client)

    return asyncio.run(run())


def create(server: Scripted, **body: Any) -> Any:
    """A whole answer."""
    return with_client(server, lambda client: client.responses.create(**{**ASKED, **body}))


def stream(server: Scripted, **body: Any) -> list[Any]:
    """The events of a stream."""

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        events = await client.responses.create(**{**ASKED, **body}, stream=True)
        return [event async for event in events]

    return list(with_client(server, use))


def told(response: Any) -> list[tuple[Any, ...]]:
    """The items without their ids."""
    found: list[tuple[Any, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.status, item.name, item.arguments))
        else:
            found.append((item.type, item.status, *(part.text for part in item.content)))
    return found


def test_an_answer_has_reasoning_a_message_and_a_call() -> None:
    """In the model's order; the fields of the request are repeated."""
    with saying(THOUGHT, THINKING) as server:
        found = create(
            server,
            tools=[LOOK],
            instructions="Be brief.",
            metadata={"a": "b"},
            max_output_tokens=300,
            store=True,
        )
    assert told(found) == [
        ("reasoning", "completed", "So."),
        ("message", "completed", "Let me."),
        ("function_call", "completed", "look", '{"city": "Paris"}'),
    ]
    assert found.output_text == "Let me."
    assert found.id.startswith("resp_")
    number = found.id.removeprefix("resp_")
    assert [item.id for item in found.output] == [
        f"{kind}_{number}_{at}" for at, kind in enumerate(("rs", "msg", "fc"))
    ]
    assert (found.status, found.incomplete_details, found.error) == ("completed", None, None)
    assert (found.instructions, found.metadata) == ("Be brief.", {"a": "b"})
    assert [tool.model_dump(exclude_none=True) for tool in found.tools] == [LOOK]
    assert found.store is False
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("So.\n</think>")
    assert found.rope["rope_type"] == "yarn"  # 300 tokens are past the native length


def test_a_stream_tells_the_same_piece_by_piece() -> None:
    """Events are numbered, and each item begins and ends."""
    with saying(THOUGHT, THINKING) as server:
        whole = create(server, tools=[LOOK])
        events = stream(server, tools=[LOOK])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    last = events[-1].response
    assert told(last) == told(whole)
    assert last.usage.output_tokens == whole.usage.output_tokens
    for kind, text in (("reasoning_text", "So."), ("output_text", "Let me.")):
        pieces = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert len(pieces) > 2
        assert "".join(pieces) == text
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 5
    (end,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(event.delta for event in pieces) == end.arguments == '{"city": "Paris"}'
    assert end.name == "look"
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in last.output]


def test_an_answer_that_max_output_tokens_cuts_is_incomplete() -> None:
    """So is its last item."""
    with saying("A long answer.") as server:
        whole = create(server, max_output_tokens=6)
        last = stream(server, max_output_tokens=6)[-1]
    assert last.type == "response.incomplete"
    for found in (whole, last.response):
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        assert told(found) == [("message", "incomplete", "A long")]


def test_a_cut_call_is_incomplete_with_its_arguments_up_to_there() -> None:
    """Streamed or not, and a whole call before it is complete."""
    with saying(CALL + CALL.replace("Paris", "Paros")) as server:
        whole = create(server, tools=[LOOK], max_output_tokens=2 * len(CALL) - 16)
        last = stream(server, tools=[LOOK], max_output_tokens=2 * len(CALL) - 16)[-1]
    assert last.type == "response.incomplete"
    for found in (whole, last.response):
        assert told(found) == [
            ("function_call", "completed", "look", '{"city": "Paris"}'),
            ("function_call", "incomplete", "look", '{"city": "Paro'),
        ]


def test_an_empty_answer_is_an_empty_message() -> None:
    """Clients look for a message."""
    with saying("") as server:
        assert told(create(server)) == [("message", "completed", "")]
        assert told(stream(server)[-1].response) == [("message", "completed", "")]


def test_parse_gives_an_object_of_the_type() -> None:
    """The client sends the schema in `text.format`."""

    class City(BaseModel):
        name: str
        people: int

    with saying('{"name":"Paris","people":2}') as server:
        found = with_client(
            server, lambda client: client.responses.parse(**ASKED, text_format=City)
        )
        plain = create(server, text={"format": {"type": "json_object"}})
    assert found.output_parsed == City(name="Paris", people=2)
    assert found.text.format.schema_["title"] == "City"
    assert plain.output_text == '{"name":"Paris","people":2}'


def test_the_items_of_an_answer_are_input_again() -> None:
    """Whatever the client's types dump; the calls and their results reach the prompt."""
    with saying([THOUGHT, "</think>Sunny."], THINKING) as server:
        first = create(server, tools=[LOOK])
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        dumped = [item.model_dump(by_alias=True) for item in first.output]
        begin = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        second = create(server, tools=[LOOK], input=[*begin, *dumped, result])
        parts = {**result, "output": [{"type": "input_text", "text": "sun"}]}
        third = create(server, tools=[LOOK], input=[*begin, *first.output, parts])
    assert second.output_text == third.output_text == "Sunny."
    assert second.usage.input_tokens == third.usage.input_tokens > first.usage.input_tokens + 20


def test_the_prompt_is_that_of_a_chat() -> None:
    """Both routes write the same messages into the template."""
    with saying("Yes.") as server:
        chat = server.ask(
            messages=[{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "Hi."}]
        )
        given = [{"role": "developer", "content": "B"}, {"role": "user", "content": "Hi."}]
        response = create(server, instructions="A", input=given)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_tools_of_other_types_are_skipped_and_named() -> None:
    """Agents offer them by default."""
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    with saying(CALL) as server:
        found = create(server, tools=[*others, LOOK])
        begun = stream(server, tools=[*others, LOOK])[0].response
    assert found.skipped_tools == begun.skipped_tools == ["web_search", "custom"]
    assert [tool.name for tool in found.tools] == ["look"]
    assert found.output[0].name == "look"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "look"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "look"}],
        },
    ],
)
def test_every_form_of_a_tool_choice_is_read(choice: Any) -> None:
    """Each form lets the model call; `none` makes a call text."""
    with saying(CALL) as server:
        found = create(server, tools=[LOOK, {**LOOK, "name": "other"}], tool_choice=choice)
        assert [item.type for item in found.output] == ["function_call"]
        none = create(server, tools=[LOOK], tool_choice="none")
    assert [item.type for item in none.output] == ["message"]


def test_text_is_sent_as_it_is() -> None:
    """Only what UTF-8 cannot hold is escaped: here a lone surrogate of the client's schema."""
    tool = {**LOOK, "output_schema": {"title": "\ud800"}}
    with saying("\u00e9\U0001f9f6") as server:
        for stream in (True, False):
            body = {"input": "Hi.", "tools": [tool], "temperature": 0, "stream": stream}
            answer = server.post("/v1/responses", body)
            assert answer.status_code == 200
            assert "\u00e9\U0001f9f6".encode() in answer.content
            assert b'"title": "\\ud800"' in answer.content
