"""The route of /v1/responses, and its answer: an object with items, or a stream of typed events."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response

from ropewalk.model_runtime.errors import (
    OutputNotReadError,
    RequestError,
    RequestTimeoutError,
    RopewalkError,
)
from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.server.api.generation_response import respond
from ropewalk.server.api.output_queue import OPENING, event
from ropewalk.server.api.service import Service
from ropewalk.server.api.structured_schema import AskedAnswer
from ropewalk.server.api.turn_request import TurnRequest, in_words_of
from ropewalk.server.errors import OUTPUT_NOT_READ, REQUEST_TIMEOUT
from ropewalk.server.middleware.json_body import JsonBodyRoute
from ropewalk.server.turns.answers.response_answer import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from ropewalk.server.turns.chat_turn import ChatTurn, prepare
from ropewalk.server.turns.item_schema import messages_of
from ropewalk.server.turns.part_answer import EventAnswer, Part
from ropewalk.server.turns.response_schema import (
    FunctionTool,
    ResponsesRequest,
    ResponsesToolChoice,
)
from ropewalk.server.turns.tool_schema import CallChoice, ChoiceMode

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}  # of an item's id
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseAnswer(EventAnswer[ResponsesRequest]):
    """An answer in the format of OpenAI's Responses."""

    always_has_text: ClassVar[bool] = True
    _num_events = 0

    def complete(self, output: Output) -> dict[str, Any]:
        return self._response(self._status(output), output)

    def first_events(self) -> bytes:
        """Return the events before the first item."""
        response = self._response("in_progress")
        return b"".join(
            [
                OPENING,
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
            ]
        )

    def begun(self, part: Part) -> bytes:
        """Return the events of an item that begins."""
        item = self._item(part, "in_progress")
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.call is not None:
            return added
        return added + self._of_part("response.content_part.added", part, part=_content(part))

    def grown(self, part: Part, text: str) -> bytes:
        """Return an event with more of a text, or with a call's arguments."""
        if part.call is not None:
            kind = "response.function_call_arguments.delta"
            return self._event(kind, **self._place(part), delta=text)
        if part.kind == "reasoning":
            return self._of_part("response.reasoning_text.delta", part, delta=text)
        return self._of_part("response.output_text.delta", part, delta=text, logprobs=[])

    def ended(self, part: Part) -> bytes:
        """Return the events of an item that is over."""
        if part.call is not None:
            kind = "response.function_call_arguments.done"
            done = self._event(kind, **self._place(part), name=part.call.name, arguments=part.text)
        else:
            if part.kind == "reasoning":
                done = self._of_part("response.reasoning_text.done", part, text=part.text)
            else:
                done = self._of_part("response.output_text.done", part, text=part.text, logprobs=[])
            done += self._of_part("response.content_part.done", part, part=_content(part))
        item = self._item(part, _status_of_part(part))
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def closed(self, output: Output) -> bytes:
        status = self._status(output)
        return self._event(f"response.{status}", response=self._response(status, output))

    def error_events(self, error: RopewalkError) -> bytes:
        """Return the event of an answer that failed."""
        response = self._response("failed")
        code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        if isinstance(error, OutputNotReadError):
            code = OUTPUT_NOT_READ
        if isinstance(error, RequestTimeoutError):
            code = REQUEST_TIMEOUT
        response["error"] = {"code": code, "message": str(error)}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _of_part(self, kind: str, part: Part, /, **fields: Any) -> bytes:
        return self._event(kind, **self._place(part), content_index=0, **fields)

    def _place(self, part: Part) -> dict[str, Any]:
        return {"item_id": self._item_id(part), "output_index": part.index}

    def _item_id(self, part: Part) -> str:
        number = self.own_id.rpartition("_")[2]  # hexadecimal
        return f"{_PREFIXES[part.kind]}_{number}_{part.index}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        if part.call is not None:
            named = {"call_id": part.call.call_id, "name": part.call.name}
            return {"type": "function_call", **item, **named, "arguments": part.text}
        content = [] if status == "in_progress" else [_content(part)]
        if part.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _response(self, status: Status, output: Output | None = None) -> dict[str, Any]:
        """Build the object, which repeats the request; `output`: the last one, at the end."""
        body, sampling = self.received, self.choices[0].request.sampling
        reasoning, text, choice = body.reasoning, body.text, body.tool_choice
        is_whole = output is not None
        return ResponseBody(
            id=self.request_id,
            created_at=self.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.model,
            output=[self._item(part, _status_of_part(part)) for part in self.parts],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            text={"format": _format(text.format if text is not None else None)},
            tool_choice=_plain(choice) if choice is not None else "auto",
            tools=[_plain(tool) for tool in body.functions],
            skipped_tools=body.skipped or None,
            metadata=body.metadata or {},
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
            user=body.user,
            usage=self._usage() if is_whole else None,
            rope=None if output is None else self.rope(0, output),
        ).model_dump()

    def _status(self, output: Output) -> Status:
        return "incomplete" if self.reader.end(output) is FinishReason.LENGTH else "completed"

    def _usage(self) -> ResponseUsage:
        counts = self.usage()
        cached = counts.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self.reader.num_reasoning_tokens
            ),
            total_tokens=counts.total_tokens,
        )


def _status_of_part(part: Part) -> str:
    return "incomplete" if part.is_cut else "completed"


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _format(given: Any) -> dict[str, Any]:
    return {"type": "text"} if given is None else _plain(given)


def _plain(given: Any) -> Any:
    if isinstance(given, str):
        return given
    return given.model_dump(by_alias=True, exclude_unset=True)


class _Request(TurnRequest):
    id_prefix: ClassVar[str] = "resp_"
    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }


def responses_router(service: Service) -> APIRouter:
    """Build a router with the route over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/responses", response_model=ResponseBody)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        asked = _Request.of(body, max_tokens=body.max_output_tokens)
        with in_words_of(_Request.names):
            async with service.reserve(asked, service.chat_template.stop) as reservation:
                prepared = await prepare(service, _turn(body))
                submission = reservation.submit(
                    [prepared.prompt_ids], prepared.grammar, prepared.shown_ids, prepared.masked_id
                )
        return await respond(http, ResponseAnswer(service, submission, asked, prepared.plan, body))

    return router


def _turn(body: ResponsesRequest) -> ChatTurn:
    """Return what a body asks of the model."""
    return ChatTurn(
        messages=messages_of(body.instructions, body.input),
        variables=body.chat_template_kwargs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=[
            tool.tool(index)
            for index, tool in enumerate(body.tools or ())
            if isinstance(tool, FunctionTool)
        ],
        choice=_choice(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        answer=AskedAnswer.of_schema(body.schema_asked),
    )


def _choice(choice: ChoiceMode | ResponsesToolChoice | None) -> CallChoice:
    """Return the choice of a turn for a `tool_choice`."""
    if not isinstance(choice, ResponsesToolChoice):
        return CallChoice(choice or "auto")
    if choice.mode is not None:
        return CallChoice(choice.mode, choice.names)
    return CallChoice.of_one(*choice.names)
