"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from fastapi import APIRouter, Request, Response

from server.api.fields.structured_schema import AskedAnswer
from server.api.generation_response import respond
from server.api.json_body import JsonBodyRoute
from server.api.messages.answer import MessageAnswer
from server.api.messages.block_schema import messages_for_template
from server.api.messages.message_schema import (
    CountTokensRequest,
    MessageBody,
    MessagesRequest,
    TokenCount,
    ToolChoice,
)
from server.api.service import Service
from server.api.tools.call_choice import CallChoice, ChoiceMode
from server.api.tools.chat_turn import ChatTurn, checked_variables, prepare, prompt_ids, render
from server.api.tools.turn_request import TurnRequest, in_words_of

# Our names of fields in errors -> the names that these bodies have for them.
_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
_MODES: Mapping[str, ChoiceMode] = {"none": "none", "auto": "auto", "any": "required"}


class _Request(TurnRequest):
    id_prefix: ClassVar[str] = "msg"
    prompt_field: ClassVar[str] = "messages"
    schema_field: ClassVar[str] = "output_config.format"


def messages_router(service: Service) -> APIRouter:
    """Build a router with the routes over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/messages", response_model=MessageBody)
    async def messages(body: MessagesRequest, http: Request) -> Response:
        asked = _Request.of(
            body, max_tokens=body.max_tokens, stop=body.stop_sequences, top_k=body.top_k
        )
        with in_words_of(_NAMES):
            async with service.reserve(asked, service.chat_template.stop) as reservation:
                prepared = await prepare(service, _turn(service, body))
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
        turn = _turn(service, body)
        tokens = await prompt_ids(service, turn, await render(service, turn))
        return TokenCount(input_tokens=len(tokens))

    return router


def _turn(service: Service, body: CountTokensRequest) -> ChatTurn:
    """Return what a body asks of the model. Raises RequestError."""
    choice = body.tool_choice
    return ChatTurn(
        messages=messages_for_template(body.system, body.messages),
        opens_answer=not body.continues,
        continue_final_message=body.continues,
        variables=checked_variables(service, body.chat_template_kwargs),
        reasoning_effort=body.effort,
        tools=[tool.tool() for tool in body.functions],
        choice=_choice(choice),
        is_parallel=choice is None or not choice.disable_parallel_tool_use,
        answer=AskedAnswer.of_schema(body.schema_asked),
    )


def _choice(choice: ToolChoice | None) -> CallChoice:
    """Return the choice of a turn for a `tool_choice`."""
    if choice is None:
        return CallChoice()
    if choice.name is not None:
        return CallChoice.of_one(choice.name)
    return CallChoice(_MODES[choice.type])
