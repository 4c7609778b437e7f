"""Several tokens in an event: `stream_interval`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest

from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.server.api.output_queue import DONE, OPENING
from tests.server.api.test_stream_events import answer_of, end, sent_by, tokens, whole_bodies
from tests.server.api.tools.scripted import Scripted, saying
from tests.server.api.tools.test_tool_calls import LOOK, accumulated
from tests.servers.tool_templates import HERMES, THINKING

SAID = "abcdefghij"  # a token is a character, and the end is one more
USER = [{"role": "user", "content": "Hi."}]
BODIES: Mapping[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi."},
    "chat/completions": {"messages": USER},
    "responses": {"input": "Hi."},
    "messages": {"messages": USER, "max_tokens": 100},
}
LIMITS = {"responses": "max_output_tokens"}
STOPS = {"messages": "stop_sequences"}


def events_of(server: Scripted, route: str, **fields: Any) -> list[dict[str, Any]]:
    """The bodies of a stream's events."""
    body = {**BODIES[route], "stream": True, "temperature": 0, **fields}
    answer = server.post(f"/v1/{route}", body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_in(event: dict[str, Any]) -> str | None:
    """The text of an event; None if it tells of something else."""
    if event.get("choices"):
        (choice,) = event["choices"]
        return choice["text"] if "text" in choice else choice["delta"].get("content")
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return event["delta"]["text"] if event.get("type") == "content_block_delta" else None


def texts_in(events: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of the events that have any."""
    return [text for text in map(text_in, events) if text]


def num_generated(route: str, events: Sequence[dict[str, Any]]) -> int:
    """The tokens that the usage of a stream counts."""
    last = events[-1]
    if route == "responses":
        return last["response"]["usage"]["output_tokens"]
    if route == "messages":
        return events[-2]["usage"]["output_tokens"]
    return last["usage"]["completion_tokens"]


def asked_usage(route: str) -> dict[str, Any]:
    """The fields with which a stream tells its usage."""
    return {"stream_options": {"include_usage": True}} if "completions" in route else {}


@pytest.mark.parametrize("route", BODIES)
def test_an_event_has_so_many_tokens_but_for_the_first_and_the_last(route: str) -> None:
    """The first token comes alone, and the last one with those that wait."""
    most = LIMITS.get(route, "max_tokens")
    with saying(SAID, stream_interval=4) as server:
        events = events_of(server, route, **asked_usage(route))
        cut = events_of(server, route, **asked_usage(route), **{most: 8})
        one = events_of(server, route, **asked_usage(route), **{most: 1})
    assert texts_in(events) == ["a", "bcde", "fghi", "j"]
    assert num_generated(route, events) == len(SAID) + 1
    assert texts_in(cut) == ["a", "bcde", "fgh"]
    assert num_generated(route, cut) == 8
    assert texts_in(one) == ["a"]
    assert num_generated(route, one) == 1


@pytest.mark.parametrize("route", [each for each in BODIES if each != "responses"])
def test_a_stop_string_ends_the_text_within_an_event(route: str) -> None:
    """Tokens that it takes back are counted."""
    fields = {STOPS.get(route, "stop"): ["ghi"], **asked_usage(route)}
    with saying(SAID, stream_interval=4) as server:
        events = events_of(server, route, **fields)
    assert texts_in(events) == ["a", "bcde", "f"]
    assert num_generated(route, events) == len("abcdefghi")


def entries(event: dict[str, Any]) -> list[Any]:
    """The logprobs of an event, in the format of its route."""
    found = event["choices"][0]["logprobs"]
    if found is None or "content" in found:
        return [] if found is None else found["content"]
    return list(zip(*(found[name] for name in sorted(found)), strict=True))


@pytest.mark.parametrize("stop", [None, "ghi"])
@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"logprobs": 2}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_an_event_has_the_logprobs_and_ids_of_all_its_tokens(
    route: str, fields: dict[str, Any], stop: str | None
) -> None:
    """They are those of single events, none lost and none twice."""
    asked = {**fields, "stop": stop, "return_token_ids": True}
    with saying(SAID, stream_interval=4) as server:
        events = events_of(server, route, **asked)
    with saying(SAID) as server:
        single = events_of(server, route, **asked)
    found = [entries(event) for event in events]
    ids = [event["choices"][0]["token_ids"] for event in events]
    assert [len(each) for each in ids] == ([1, 4, 4] if stop else [1, 4, 4, 2])
    assert [len(each) for each in found] == ([1, 4, 1] if stop else [1, 4, 4, 2])
    assert [*chain(*found)] == [*chain(*map(entries, single))]
    assert [*chain(*ids)] == [*chain(*(event["choices"][0]["token_ids"] for event in single))]


def test_reasoning_and_a_call_lose_nothing() -> None:
    """Parts begin and end within events, and the tokens of the reasoning are counted singly."""
    call = '<tool_call>\n{"name": "look", "arguments": {"city":"Paris"}}\n</tool_call>'
    said = f"the city is Paris\n</think>\n\nSo:\n{call}"
    usage = {"stream_options": {"include_usage": True}}
    found = []
    for interval in (1, 4, 7, 1024):
        with saying(said, THINKING, stream_interval=interval) as server:
            chunks = server.stream(tools=[LOOK], **usage)
        details = chunks[-1].usage.completion_tokens_details
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        reasoning = "".join(getattr(each, "reasoning", None) or "" for each in deltas)
        text, calls, reason = accumulated(chunks)
        told = [(name, json.loads(arguments)) for _, name, arguments in calls]
        found.append((reasoning, text, told, reason, details.reasoning_tokens))
    assert found[0][0] == "the city is Paris"
    assert found[0][2] == [("look", {"city": "Paris"})]
    assert found[0][4] == len("the city is Paris\n</think>")
    assert all(each == found[0] for each in found)


def test_whole_answers_are_the_same() -> None:
    """The setting is one of streams."""
    with saying(SAID, HERMES, stream_interval=4) as server:
        found = server.ask(logprobs=True)
    assert found.choices[0].message.content == SAID
    assert len(found.choices[0].logprobs.content) == found.usage.completion_tokens == len(SAID) + 1


def test_choices_are_counted_apart() -> None:
    """Tokens of one choice fill no event of another."""
    outputs = {index: [*tokens(index)[:6], end(index)] for index in (0, 1)}
    given = [outputs[index][at] for at in range(7) for index in (0, 1)]

    async def check() -> None:
        answer, engine = answer_of("completions", interval=3, n=2)
        sent = b"".join(await sent_by(answer, engine, [given]))
        bodies = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith(b"data: {")]
        for index in (0, 1):
            choices = [each["choices"][0] for each in bodies]
            texts = [each["text"] for each in choices if each["index"] == index]
            said = [output.text for _, output in outputs[index]]
            assert texts == [said[0], "".join(said[1:4]), "".join(said[4:])]

    asyncio.run(check())


def test_a_failure_sends_no_event_that_is_not_full() -> None:
    """A router that goes on with the stream elsewhere compares whole events."""
    failed = (0, Output(finish_reason=FinishReason.ERROR, error="out of chalk"))
    outputs = tokens()[:3]

    async def check() -> None:
        answer, engine = answer_of("completions", interval=4)
        sent = b"".join(await sent_by(answer, engine, [[*outputs, failed]]))
        before = OPENING + whole_bodies(answer_of("completions")[0], outputs[:1])
        assert sent.startswith(before)
        rest = sent.removeprefix(before).removesuffix(DONE)
        assert rest.startswith(b'data: {"error"')
        assert rest.count(b"data: ") == 1

    asyncio.run(check())
