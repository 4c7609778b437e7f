"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ropewalk.model_runtime.request import Output
from ropewalk.model_runtime.text.tools.answer_reader import ReadingPlan
from ropewalk.server.api.generation_response import (
    ChunkAnswer,
    finish_reason,
    finite,
    name_request,
    respond,
)
from ropewalk.server.api.output_queue import Submission
from ropewalk.server.api.parts.logprobs import ChatLogprobs, TokenLogprobs, TopLogprob
from ropewalk.server.api.parts.usage import CompletionTokensDetails, Usage
from ropewalk.server.api.service import Service
from ropewalk.server.middleware.json_body import JsonBodyRoute
from ropewalk.server.turns.answers.chat_answer import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatResponse,
    ChunkChoice,
    Delta,
    DeltaCall,
    DeltaFunction,
)
from ropewalk.server.turns.chat_schema import ChatRequest
from ropewalk.server.turns.chat_turn import ChatTurn, prepare
from ropewalk.server.turns.part_answer import Part, PartAnswer
from ropewalk.server.turns.tool_schema import call_choice


def chat_router(service: Service) -> APIRouter:
    """Build a router with the route over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/chat/completions", response_model=ChatResponse)
    async def chat(body: ChatRequest, http: Request) -> Response:
        name_request(http, body.request_id)
        async with service.reserve(body, service.chat_template.stop) as reservation:
            turn = _turn(body)
            prepared = await prepare(service, turn)
            predicted_ids: Sequence[int] = ()
            if body.prediction is not None:
                predicted_ids = await service.tokenize(
                    body.prediction.text, add_special_tokens=False, param="prediction"
                )
            submission = reservation.submit(
                [prepared.prompt_ids],
                prepared.grammar,
                prepared.shown_ids,
                prepared.masked_id,
                predicted_ids,
            )
        return await respond(http, _ChatAnswer(service, submission, body, turn, prepared.plan))

    return router


def _turn(body: ChatRequest) -> ChatTurn:
    """Return what a body asks of the model."""
    return ChatTurn(
        messages=[message.for_template() for message in body.messages],
        opens_answer=body.opens_answer,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs,
        documents=body.documents,
        reasoning_effort=body.reasoning_effort,
        tools=[tool.tool(index) for index, tool in enumerate(body.tools or ())],
        choice=call_choice(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        answer=body.asked_answer,
        whitespace=body.whitespace_asked,
    )


class _ChatAnswer(ChunkAnswer[ChatRequest], PartAnswer[ChatRequest, dict[str, Any]]):
    """An answer in OpenAI's chat format; what tells of a part is the fields of a delta."""

    chunk_model = ChatChunk

    def __init__(
        self,
        service: Service,
        submission: Submission,
        body: ChatRequest,
        turn: ChatTurn,
        plan: ReadingPlan | None,
    ) -> None:
        """`plan`: how the answers are read; None: they are text."""
        super().__init__(service, submission, body, plan, is_named=turn.choice.is_named)
        self._has_begun = [False for _ in submission.requests]
        self._tells_reasoning = plan is not None and plan.reasoning is not None

    def usage(self) -> Usage:
        """Return the token counts, with those of reasoning and of a prediction if there are any."""
        details: dict[str, int] = {}
        if self._tells_reasoning:
            details["reasoning_tokens"] = sum(each.num_reasoning_tokens for each in self.readers)
        if self.body.prediction is not None:
            # Only then: the numbers follow the measured steps, so they differ between equal bodies.
            details["accepted_prediction_tokens"] = sum(each.drafts[0] for each in self.choices)
            details["rejected_prediction_tokens"] = sum(each.drafts[1] for each in self.choices)
        usage = super().usage()
        if not details:
            return usage
        parts = CompletionTokensDetails(**details)
        return usage.model_copy(update={"completion_tokens_details": parts})

    def whole_body(self, outputs: Sequence[Output]) -> ChatResponse:
        """Build the body with every choice."""
        return ChatResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=self._message(index, output),
                    logprobs=self._logprobs(output),
                    finish_reason=self._finish_reason(index, output),
                    rope=self.rope(index, output),
                    token_ids=self.token_ids(output),
                )
                for index, output in enumerate(outputs)
            ],
            usage=self.usage(),
            timings=self.timings(),
            prompt_logprobs=self.prompt_logprobs(outputs[0]),
            prompt_token_ids=self.prompt_token_ids(0),
        )

    def _message(self, index: int, output: Output) -> AnswerMessage:
        if not self.readers:
            return AnswerMessage(content=output.text)
        parts = self.readers[index].take(output)
        calls = [
            AnswerCall(
                id=part.call.call_id,
                function=AnswerFunction(name=part.call.name, arguments=part.text),
            )
            for part in parts
            if part.call is not None
        ]
        text, reasoning = (
            "".join(part.text for part in parts if part.kind == kind)
            for kind in ("text", "reasoning")
        )
        return AnswerMessage(
            content=text if text or not calls else None,
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or None,
        )

    def begun(self, part: Part) -> dict[str, Any] | None:
        call = part.call
        if call is None:
            return None
        function = DeltaFunction(name=call.name, arguments="")
        begun = DeltaCall(index=call.index, id=call.call_id, type="function", function=function)
        return {"tool_calls": [begun]}

    def grown(self, part: Part, text: str) -> dict[str, Any]:
        if part.call is not None:
            function = DeltaFunction(arguments=text)
            return {"tool_calls": [DeltaCall(index=part.call.index, function=function)]}
        return dict.fromkeys(_REASONING if part.kind == "reasoning" else _TEXT, text)

    def ended(self, part: Part) -> None:  # noqa: ARG002
        return None

    def piece(self, index: int, output: Output) -> ChunkChoice:
        return self._chunks(index, output, [{"content": output.text}])[0]

    def pieces(self, index: int, output: Output) -> Sequence[ChunkChoice]:
        """Build the next pieces of one choice, as OpenAI does.

        A call begins in a piece of its own, after the role, and the end has an empty one after it.
        """
        if not self.readers:
            return [self.piece(index, output)]
        deltas = _joined(self.told(index, output))
        if not self._has_begun[index] and deltas and "tool_calls" in deltas[0]:
            deltas.insert(0, {})
        if output.finish_reason is not None and (not deltas or "tool_calls" in deltas[-1]):
            deltas.append({})
        if not deltas and (output.logprobs or self.token_ids(output)):
            deltas.append({})
        return self._chunks(index, output, deltas)

    def _chunks(
        self, index: int, output: Output, deltas: Sequence[dict[str, Any]]
    ) -> list[ChunkChoice]:
        """Build a piece of each delta. The first has the tokens, and the last the reason."""
        chunks = []
        for at, fields in enumerate(deltas):
            if not self._has_begun[index]:
                self._has_begun[index] = True
                fields["role"] = "assistant"
            is_last = at + 1 == len(deltas)
            chunks.append(
                ChunkChoice(
                    index=index,
                    delta=Delta(**fields),
                    logprobs=None if at else self._logprobs(output),
                    finish_reason=self._finish_reason(index, output) if is_last else None,
                    rope=self.rope(index, output),
                    token_ids=None if at else self.token_ids(output),
                )
            )
        return chunks

    def _finish_reason(self, index: int, output: Output) -> str | None:
        if self.readers:
            return self.readers[index].finish_reason(output)
        return finish_reason(output)

    def shows_prompt(self, index: int) -> bool:  # noqa: ARG002  # all choices have one prompt
        return super().shows_prompt(0)

    def own_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_token_ids(0)}

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprobs(
                    **self._scored(entry.token_id, entry.logprob),
                    top_logprobs=[TopLogprob(**self._scored(*each)) for each in entry.top],
                )
                for entry in output.logprobs
            ]
        )

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self.service.tokenizer
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }


def _joined(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join text and reasoning that follow each other; a delta of a call stays one of its own."""
    found: list[dict[str, Any]] = []
    for fields in deltas:
        if "tool_calls" in fields or not found or "tool_calls" in found[-1]:
            found.append(fields)
            continue
        last = found[-1]
        last.update({name: last.get(name, "") + text for name, text in fields.items()})
    return found


# Reasoning has two names, as clients read either.
_TEXT, _REASONING = ("content",), ("reasoning_content", "reasoning")
