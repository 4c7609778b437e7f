"""POST /v1/responses."""

from typing import ClassVar

from fastapi import APIRouter, Request, Response

from server.api.fields.structured_schema import AskedAnswer
from server.api.generation_response import respond
from server.api.json_body import JsonBodyRoute
from server.api.responses.answer import ResponseAnswer
from server.api.responses.item_schema import messages_of
from server.api.responses.response_schema import ResponseBody, ResponsesRequest, ToolChoice
from server.api.service import Service
from server.api.tools.call_choice import CallChoice, ChoiceMode
from server.api.tools.chat_turn import ChatTurn, checked_variables, prepare
from server.api.tools.turn_request import TurnRequest, in_words_of

# Our names of fields in errors -> the names that this body has for them.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class _Request(TurnRequest):
    id_prefix: ClassVar[str] = "resp"
    prompt_field: ClassVar[str] = "input"
    schema_field: ClassVar[str] = "text.format"


def responses_router(service: Service) -> APIRouter:
    """Build a router with the route over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/responses", response_model=ResponseBody)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        asked = _Request.of(body, max_tokens=body.max_output_tokens)
        with in_words_of(_NAMES):
            async with service.reserve(asked, service.chat_template.stop) as reservation:
                prepared = await prepare(service, _turn(service, body))
                submission = reservation.submit(
                    [prepared.prompt_ids], prepared.grammar, prepared.shown_ids, prepared.masked_id
                )
        return await respond(http, ResponseAnswer(service, submission, asked, prepared.plan, body))

    return router


def _turn(service: Service, body: ResponsesRequest) -> ChatTurn:
    """Return what a body asks of the model. Raises RequestError."""
    return ChatTurn(
        messages=messages_of(body.instructions, body.input),
        variables=checked_variables(service, body.chat_template_kwargs),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=[tool.tool() for tool in body.functions],
        choice=_choice(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        answer=AskedAnswer.of_schema(body.schema_asked),
    )


def _choice(choice: ChoiceMode | ToolChoice | None) -> CallChoice:
    """Return the choice of a turn for a `tool_choice`."""
    if not isinstance(choice, ToolChoice):
        return CallChoice(choice or "auto")
    if choice.mode is not None:
        return CallChoice(choice.mode, choice.names)
    return CallChoice.of_one(*choice.names)
