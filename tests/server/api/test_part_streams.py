"""Streams of parts when nothing comes, and when the engine fails."""

import asyncio
import json
from typing import Any

import pytest

from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.server.api.output_queue import KEEP_ALIVE
from ropewalk.server.api.turn_request import TurnRequest
from ropewalk.server.turns.message_schema import MessagesRequest
from ropewalk.server.turns.messages import MessageAnswer
from ropewalk.server.turns.part_answer import EventAnswer
from ropewalk.server.turns.response_schema import ResponsesRequest
from ropewalk.server.turns.responses import ResponseAnswer
from tests.server.api.test_stream_events import PLACEMENT, Outputs, sent_by, submitted

USER = {"role": "user", "content": "a"}
BODIES: dict[str, tuple[type[EventAnswer[Any]], Any]] = {
    "responses": (ResponseAnswer, ResponsesRequest(input="a")),
    "messages": (
        MessageAnswer,
        MessagesRequest.model_validate({"messages": [USER], "max_tokens": 9}),
    ),
}


def answer_of(api: str, keep_alive_s: float = 0.0) -> tuple[EventAnswer[Any], Outputs]:
    """A streamed answer, and the engine behind it. Needs a running loop."""
    answer_type, body = BODIES[api]
    service, submission, engine = submitted(keep_alive_s=keep_alive_s)
    asked = TurnRequest.model_construct(max_tokens=9, stream=True)
    return answer_type(service, submission, asked, None, body), engine


def events_of(sent: list[bytes]) -> list[dict[str, Any]]:
    """The bodies of the events."""
    lines = b"".join(sent).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("api", BODIES)
def test_a_failure_after_the_first_byte_is_an_event(api: str) -> None:
    """It is the last one, and it keeps what came before."""
    said = (0, Output(text="ab", token_ids=(97,), tier=PLACEMENT.tier))
    failed = (0, Output(finish_reason=FinishReason.ERROR, error="out of chalk"))

    async def check() -> list[bytes]:
        answer, engine = answer_of(api)
        return await sent_by(answer, engine, [[said], [failed]])

    events = events_of(asyncio.run(check()))
    told = "The request failed: out of chalk."
    if api == "messages":
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": told}}
        assert events[-2]["delta"] == {"type": "text_delta", "text": "ab"}
    else:
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.failed"
        assert (response["status"], response["error"]["message"]) == ("failed", told)
        assert response["output"][0]["content"][0]["text"] == "ab"


@pytest.mark.parametrize(("api", "kept"), [("responses", KEEP_ALIVE), ("messages", b"event: ping")])
def test_a_silent_stream_is_kept_open(api: str, kept: bytes) -> None:
    """By a comment, or by the event that Anthropic's API has for it."""

    async def check() -> bytes:
        answer, _ = answer_of(api, keep_alive_s=0.01)
        pieces = answer.events()
        await anext(pieces)
        silent = await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        answer.close()
        return silent

    assert asyncio.run(check()).startswith(kept)
