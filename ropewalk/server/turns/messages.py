"""The route of /v1/messages, its errors, and its answer: blocks, or a stream of typed events."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.model_runtime.errors import (
    OutputNotReadError,
    RequestError,
    RequestTimeoutError,
    RopewalkError,
)
from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.server.api.generation_response import respond
from ropewalk.server.api.output_queue import event, json_bytes
from ropewalk.server.api.service import Service
from ropewalk.server.api.structured_schema import AskedAnswer
from ropewalk.server.api.turn_request import TurnRequest, in_words_of
from ropewalk.server.errors import OUTPUT_NOT_READ
from ropewalk.server.middleware.json_body import JsonBodyRoute
from ropewalk.server.turns.block_schema import messages_for_template
from ropewalk.server.turns.chat_turn import ChatTurn, prepare, prompt_ids, render
from ropewalk.server.turns.message_schema import (
    ClientTool,
    CountTokensRequest,
    MessageBody,
    MessagesRequest,
    MessagesToolChoice,
    MessageUsage,
    ThinkingTokens,
    TokenCount,
)
from ropewalk.server.turns.part_answer import EventAnswer, Part
from ropewalk.server.turns.tool_schema import CallChoice, ChoiceMode

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer(EventAnswer[MessagesRequest]):
    """An answer in the format of Anthropic's Messages."""

    _has_begun = False

    def complete(self, output: Output) -> dict[str, Any]:
        return self._message(output)

    def silent_event(self) -> bytes:
        return _event("ping")

    async def output_events(self, index: int, output: Output) -> bytes:
        """Return the events of one output; the first tells how much of the prompt was cached."""
        events = await super().output_events(index, output)
        if self._has_begun:
            return events
        self._has_begun = True
        return _event("message_start", message=self._message(None)) + events

    def begun(self, part: Part) -> bytes:
        return _event("content_block_start", index=part.index, content_block=_block(part))

    def grown(self, part: Part, text: str) -> bytes:
        kind, name = _DELTAS[part.kind]
        return _event("content_block_delta", index=part.index, delta={"type": kind, name: text})

    def ended(self, part: Part) -> bytes:
        return _event("content_block_stop", index=part.index)

    def closed(self, output: Output) -> bytes:
        """Return the events of the end."""
        message = self._message(output)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        end = _event("message_delta", delta=delta, usage=message["usage"], rope=message["rope"])
        return end + _event("message_stop")

    def error_events(self, error: RopewalkError) -> bytes:
        """Return the event of an answer that failed."""
        kind = "invalid_request_error" if isinstance(error, RequestError) else "api_error"
        kind = "timeout_error" if isinstance(error, RequestTimeoutError) else kind
        code = {"code": OUTPUT_NOT_READ} if isinstance(error, OutputNotReadError) else {}
        return _event("error", error={"type": kind, "message": str(error), **code})

    def _message(self, output: Output | None) -> dict[str, Any]:
        """Build the object; `output`: the last one, at the end."""
        counts = self.usage()
        cached = counts.prompt_tokens_details.cached_tokens
        return MessageBody(
            id=self.request_id,
            model=self.model,
            content=[] if output is None else [_block(part) for part in self.parts],
            stop_reason=None if output is None else self._stop_reason(output),
            stop_sequence=None if output is None else self._stop_sequence(output),
            usage=MessageUsage(
                input_tokens=counts.prompt_tokens - cached,
                cache_read_input_tokens=cached,
                output_tokens=counts.completion_tokens,
                output_tokens_details=ThinkingTokens(
                    thinking_tokens=self.reader.num_reasoning_tokens
                ),
            ),
            skipped_tools=self.received.skipped or None,
            rope=None if output is None else self.rope(0, output),
        ).model_dump()

    def _stop_reason(self, output: Output) -> str:
        if self.reader.end(output) is FinishReason.LENGTH:
            # The body has the max_tokens that there was room for.
            is_full = self.choices[0].num_generated == self.body.max_tokens
            had_room = self.body.max_tokens == self.received.max_tokens
            return "model_context_window_exceeded" if is_full and not had_room else "max_tokens"
        if any(part.kind == "call" and not part.is_cut for part in self.parts):
            return "tool_use"
        return "end_turn" if self._stop_sequence(output) is None else "stop_sequence"

    def _stop_sequence(self, output: Output) -> str | None:
        """Return the client's stop string that ended the answer, not one of the chat template."""
        asked = self.received.stop_sequences or ()
        return output.stop_string if output.stop_string in asked else None


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _block(part: Part) -> dict[str, Any]:
    """Return a block; one that begins has no text yet."""
    if part.call is not None:
        # Anthropic's client reads the pieces of a cut call so, too.
        text = part.text or "{}"
        arguments = from_json(text, allow_partial=True) if part.is_cut else json.loads(text)
        named = {"id": part.call.call_id, "name": part.call.name}
        return {"type": "tool_use", **named, "input": arguments}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


_PATH = "/v1/messages"
# status -> Anthropic's type of an error
_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIRST_OWN = 500  # from here on it is the server's fault


class AnthropicErrorsMiddleware:
    """Middleware that puts OpenAI's error bodies into Anthropic's envelope, on its routes only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == _PATH or path.startswith(f"{_PATH}/")):
            await self._app(scope, receive, send)
            return
        held: list[Message] = []  # the start of an error, until its body is known
        body = b""

        async def send_in_envelope(message: Message) -> None:
            nonlocal body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held.append(message)
                return
            if not held:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                start = held.pop()
                content = _in_envelope(start["status"], body)
                MutableHeaders(scope=start)["Content-Length"] = str(len(content))
                await send(start)
                await send({**message, "body": content})

        await self._app(scope, receive, send_in_envelope)


def _in_envelope(status: int, body: bytes) -> bytes:
    """Return an error's body with Anthropic's type; its other fields stay beside the message."""
    try:
        error: dict[str, Any] = dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body  # an empty body, or none of ours
    error["type"] = error_type(status)
    return json_bytes({"type": "error", "error": error})


def error_type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= _FIRST_OWN else "invalid_request_error")


_MODES: Mapping[str, ChoiceMode] = {"none": "none", "auto": "auto", "any": "required"}


class _Request(TurnRequest):
    id_prefix: ClassVar[str] = "msg_"
    names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
    }


def messages_router(service: Service) -> APIRouter:
    """Build a router with the routes over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/messages", response_model=MessageBody)
    async def messages(body: MessagesRequest, http: Request) -> Response:
        asked = _Request.of(
            body, max_tokens=body.max_tokens, stop=body.stop_sequences, top_k=body.top_k
        )
        with in_words_of(_Request.names):
            async with service.reserve(asked, service.chat_template.stop) as reservation:
                prepared = await prepare(service, _turn(body))
                # The field is required, so clients send more than there may be room for.
                room = reservation.deployment.max_len - len(prepared.prompt_ids) + 1
                if room < body.max_tokens:
                    asked = asked.model_copy(update={"max_tokens": max(room, 1)})
                submission = replace(reservation, body=asked).submit(
                    [prepared.prompt_ids], prepared.grammar, prepared.shown_ids, prepared.masked_id
                )
        return await respond(http, MessageAnswer(service, submission, asked, prepared.plan, body))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        service.deployment(body.model)
        turn = _turn(body)
        tokens = await prompt_ids(service, turn, await render(service, turn))
        return TokenCount(input_tokens=len(tokens))

    return router


def _turn(body: CountTokensRequest) -> ChatTurn:
    """Return what a body asks of the model."""
    choice = body.tool_choice
    return ChatTurn(
        messages=messages_for_template(body.system, body.messages),
        opens_answer=not body.continues,
        continue_final_message=body.continues,
        variables=body.chat_template_kwargs,
        reasoning_effort=body.effort,
        tools=[
            tool.tool(index)
            for index, tool in enumerate(body.tools or ())
            if isinstance(tool, ClientTool)
        ],
        choice=_choice(choice),
        is_parallel=choice is None or not choice.disable_parallel_tool_use,
        answer=AskedAnswer.of_schema(body.schema_asked),
    )


def _choice(choice: MessagesToolChoice | None) -> CallChoice:
    """Return the choice of a turn for a `tool_choice`."""
    if choice is None:
        return CallChoice()
    if choice.name is not None:
        return CallChoice.of_one(choice.name)
    return CallChoice(_MODES[choice.type])
