"""/v1/messages through Anthropic's client, with a model that says what the test wants."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx2  # Anthropic's client takes no other
import pytest

from tests.server.api.tools.scripted import Scripted, saying
from tests.servers.tool_templates import THINKING

if TYPE_CHECKING:
    import anthropic  # every worker would pay for it

LOOK = {
    "name": "look",
    "description": "To look.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city":"Paris"}}\n</tool_call>'
THOUGHT = f"So.\n</think>\n\nLet me.\n{CALL}"
USER = {"role": "user", "content": "Hi."}
ASKED: dict[str, Any] = {
    "model": "ropewalk-demo",
    "max_tokens": 300,
    "messages": [USER],
    "extra_body": {"temperature": 0},
}


def with_client(
    server: Scripted, use: "Callable[[anthropic.AsyncAnthropic], Awaitable[Any]]"
) -> Any:
    """The result of a use of Anthropic's client."""
    import anthropic

    async def run() -> Any:
        transport = httpx2.ASGITransport(app=server.app)
        http = httpx2.AsyncClient(transport=transport, base_url="http://scripted")
        async with anthropic.AsyncAnthropic(
            base_url="http://scripted", api_key="none", max_retries=0, http_client=http
        ) as client:
            return await use(client)

    return asyncio.run(run())


def create(server: Scripted, **body: Any) -> Any:
    """A whole answer."""
    return with_client(server, lambda client: client.messages.create(**{**ASKED, **body}))


def stream(server: Scripted, **body: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the message that the client makes of them."""

    async def use(client: "anthropic.AsyncAnthropic") -> tuple[list[Any], Any]:
        async with client.messages.stream(**{**ASKED, **body}) as running:
            events = [event async for event in running]
            return events, await running.get_final_message()

    found: tuple[list[Any], Any] = with_client(server, use)
    return found


def told(message: Any) -> list[Any]:
    """The blocks without the ids of calls."""
    return [
        block.model_dump(include={"type", "thinking", "text", "name", "input"})
        for block in message.content
    ]


SAID = [
    {"type": "thinking", "thinking": "So."},
    {"type": "text", "text": "Let me."},
    {"type": "tool_use", "name": "look", "input": {"city": "Paris"}},
]


def test_an_answer_has_thinking_text_and_a_call() -> None:
    """Streamed or not."""
    with saying(THOUGHT, THINKING) as server:
        whole = create(server, tools=[LOOK], system="Be brief.")
        events, final = stream(server, tools=[LOOK], system=[{"type": "text", "text": "Be brief."}])
    for message in (whole, final):
        assert told(message) == SAID
        assert message.id.startswith("msg_")
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        assert message.model == "ropewalk-demo"
        usage = message.usage
        assert usage.output_tokens_details.thinking_tokens == len("So.\n</think>")
        assert usage.input_tokens + usage.cache_read_input_tokens == (
            whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        )
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.rope["rope_type"] == "yarn"  # 300 tokens are past the native length
    kinds = [event.type for event in events if event.type.startswith(("message", "content"))]
    assert list(dict.fromkeys(kinds)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    pieces = [event.delta for event in events if event.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in pieces if delta.type == "input_json_delta"]
    assert len(pieces) > 5
    assert "".join(pieces) == '{"city": "Paris"}'
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2]


def test_a_cut_call_has_its_input_up_to_there() -> None:
    """The client reads the pieces of a stream as the server reads the whole."""
    said = CALL.replace("\n", "").replace("Paris", "Pà, rís")
    with saying(said) as server:
        for length in range(len('<tool_call>{"name": "look", "arguments": {'), len(said), 3):
            whole = create(server, tools=[LOOK], max_tokens=length)
            final = stream(server, tools=[LOOK], max_tokens=length)[1]
            assert told(whole) == told(final), length
            assert whole.stop_reason == final.stop_reason == "max_tokens"
            assert [block.type for block in whole.content] == ["tool_use"]


def test_a_loop_of_a_call_its_result_and_the_end() -> None:
    """The client sends the blocks of the answer back as they came."""
    with saying([THOUGHT, "</think>Sunny."], THINKING) as server:
        first = stream(server, tools=[LOOK])[1]
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sun"}
        parts = [{"type": "text", "text": "And?"}]
        messages = [
            USER,
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result, *parts]},
        ]
        events, final = stream(server, tools=[LOOK], messages=messages)
        again = create(server, tools=[LOOK], messages=messages)
        counted, without_result = (
            with_client(
                server,
                lambda client, sent=sent: client.messages.count_tokens(
                    model="ropewalk-demo", messages=sent, tools=[LOOK]
                ),
            )
            for sent in (
                messages,
                [*messages[:2], {**USER, "content": [{**result, "content": ""}, *parts]}],
            )
        )
    assert [block.text for block in final.content] == ["Sunny."]
    assert final.stop_reason == again.stop_reason == "end_turn"
    read = again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert counted.input_tokens == read == without_result.input_tokens + len("sun")
    assert again.usage.cache_read_input_tokens > 0
    assert [event.text for event in events if event.type == "text"] == [*"Sunny."]


def test_the_reasons_of_the_end() -> None:
    """A stop sequence is named; more tokens than there is room for are no mistake."""
    with saying("One, two, three.") as server:
        stopped = create(server, stop_sequences=["never", ", th"])
        assert (stopped.content[0].text, stopped.stop_reason) == ("One, two", "stop_sequence")
        assert stopped.stop_sequence == ", th"
        final = stream(server, stop_sequences=["two"])[1]
        assert (final.content[0].text, final.stop_sequence) == ("One, ", "two")
        cut = create(server, max_tokens=4)
        assert (cut.content[0].text, cut.stop_reason) == ("One,", "max_tokens")
        assert create(server, max_tokens=20_000).stop_reason == "end_turn"
    with saying("1" * 3000) as server:
        full = create(server, max_tokens=20_000)
    assert full.stop_reason == "model_context_window_exceeded"
    usage = full.usage
    read = usage.input_tokens + usage.cache_read_input_tokens
    assert read + usage.output_tokens == 2048 + 1  # the last token is never read back


def test_an_answer_goes_on_from_a_last_message_of_the_assistant() -> None:
    """The prompt ends inside that message, so it is shorter than a new turn's."""
    with saying("yes") as server:
        begun = create(server, messages=[USER, {"role": "assistant", "content": "I say"}])
        chat = server.ask(
            messages=[USER, {"role": "assistant", "content": "I say"}],
            extra_body={"continue_final_message": True},
        )
    read = begun.usage.input_tokens + begun.usage.cache_read_input_tokens
    assert read == chat.usage.prompt_tokens


def test_a_schema_and_a_tool_choice_are_enforced() -> None:
    """`any` and `tool` make the model call, `none` takes the tools from the prompt."""
    with saying("</think>" + CALL, THINKING) as server:
        for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
            found = create(server, tools=[LOOK], tool_choice=choice)
            assert (told(found), found.stop_reason) == ([SAID[2]], "tool_use")
        none = create(server, tools=[LOOK], tool_choice={"type": "none"})
        assert [block.type for block in none.content] == ["text"]
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    with saying('{"a":1}') as server:
        found = create(server, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert found.content[0].text == '{"a":1}'


def test_default_fields_of_agents_are_accepted() -> None:
    """Hints change nothing, and tools that only Anthropic runs are skipped and named."""
    hint = {"type": "ephemeral"}
    body = {
        "model": "ropewalk-demo",
        "max_tokens": 32_000,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}],
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": hint}],
        "tools": [
            {**LOOK, "cache_control": hint},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    with saying("Yes.") as server:
        answer = server.post("/v1/messages?beta=true", body)
        plain = server.post("/v1/messages", {**body, "stream": False}).json()
    assert answer.status_code == 200
    assert "event: message_stop" in answer.text.splitlines()
    assert plain["skipped_tools"] == ["web_search_20250305"]


def test_the_clients_errors_have_their_classes() -> None:
    """By status, with the type of Anthropic's envelope."""
    import anthropic

    with saying("Yes.") as server:
        with pytest.raises(anthropic.BadRequestError) as raised:
            create(server, messages=[{"role": "user", "content": 5}])
        assert raised.value.body == {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "`messages.0.content` must be a string or a list of text parts",
                "param": "messages.0.content",
                "code": None,
            },
        }
        with pytest.raises(anthropic.NotFoundError):
            create(server, model="no")
