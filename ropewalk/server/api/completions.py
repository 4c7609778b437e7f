"""POST /v1/completions."""

import math
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ropewalk.model_runtime.request import Output, TokenLogprob
from ropewalk.model_runtime.request import Request as EngineRequest
from ropewalk.model_runtime.text.detokenizer import Detokenizer
from ropewalk.server.api.completion_schema import Choice, CompletionRequest, CompletionResponse
from ropewalk.server.api.generation_response import (
    ChunkAnswer,
    finish_reason,
    finite,
    name_request,
    respond,
)
from ropewalk.server.api.output_queue import Submission
from ropewalk.server.api.parts.logprobs import Logprobs
from ropewalk.server.api.service import Service
from ropewalk.server.middleware.json_body import JsonBodyRoute


def completions_router(service: Service) -> APIRouter:
    """Build a router with the route over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        name_request(http, body.request_id)
        async with service.reserve(body) as reservation:
            grammar = await service.grammar(body.asked_answer, body.whitespace_asked)
            prompts = await _tokenize(service, body)
            submission = reservation.submit(prompts, grammar)
        return await respond(http, _CompletionAnswer(service, submission, body))

    return router


async def _tokenize(service: Service, body: CompletionRequest) -> list[tuple[int, ...]]:
    """Tokenise the prompts; special tokens are added to texts only."""
    prompts = []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            token_ids = await service.tokenize(
                prompt, add_special_tokens=body.add_special_tokens is not False
            )
            prompts.append(token_ids)
        else:
            prompts.append(tuple(prompt))
    return prompts


class _CompletionAnswer(ChunkAnswer[CompletionRequest]):
    """An answer in OpenAI's classic format; an event has the format of a whole answer."""

    chunk_model = CompletionResponse

    def __init__(self, service: Service, submission: Submission, body: CompletionRequest) -> None:
        super().__init__(service, submission, body)
        self._pieces: dict[int, Detokenizer] = {}  # by choice, if logprobs are requested
        self._offsets = [0 for _ in submission.requests]
        self._is_echoed = [not body.echo for _ in submission.requests]

    def whole_body(self, outputs: Sequence[Output]) -> BaseModel:
        """Build the body with every choice, or with the best of each prompt."""
        kept: Sequence[int] = range(len(outputs))
        if self.body.picks_best:
            kept = self._best(outputs)
        choices = [
            self._choice(index, outputs[index]).model_copy(update={"index": rank})
            for rank, index in enumerate(kept)
        ]
        return self.event_body(choices, usage=self.usage())

    def shows_prompt(self, index: int) -> bool:
        """Return whether the next event of a choice has the prompt's text or tokens."""
        return not self._is_echoed[index] or super().shows_prompt(index)

    def piece(self, index: int, output: Output) -> Choice:
        return self._choice(index, output)

    def _best(self, outputs: Sequence[Output]) -> Sequence[int]:
        """Return the n likeliest answers of each prompt, by mean log-probability of a token."""
        of_prompt = self.body.num_answers
        kept: list[int] = []
        for first in range(0, len(outputs), of_prompt):
            candidates = range(first, first + of_prompt)
            ranked = sorted(candidates, key=lambda index: -_mean_logprob(outputs[index]))
            kept += ranked[: self.body.n or 1]
        return kept

    def _pieces_of(self, request: EngineRequest) -> Detokenizer:
        """Return a stream with one piece of text per token, so that offsets add up to the text."""
        before = () if self.body.echo else request.prompt_ids
        return Detokenizer(self.service.tokenizer, before, (), request.shown_ids)

    def _choice(self, index: int, output: Output) -> Choice:
        echoed = ""
        if not self._is_echoed[index]:
            echoed = self.service.tokenizer.decode(
                list(self.choices[index].request.prompt_ids),
                skip_special_tokens=not self.body.shows_special,
            )
            self._is_echoed[index] = True
        return Choice(
            index=index,
            text=echoed + output.text,
            logprobs=self._logprobs(index, output),
            finish_reason=finish_reason(output),
            rope=self.rope(index, output),
            prompt_logprobs=self.prompt_logprobs(output),
            token_ids=self.token_ids(output),
            prompt_token_ids=self.prompt_token_ids(index),
        )

    def _logprobs(self, index: int, output: Output) -> Logprobs | None:
        """Build the classic format, which begins with the tokens of an echoed prompt."""
        if self.body.logprobs is None:
            return None
        scored_ids = self.choices[index].request.prompt_ids if output.prompt_logprobs else ()
        echoed = zip(scored_ids, output.prompt_logprobs, strict=True) if self.body.echo else ()
        entries = [
            *echoed,
            *((scored.token_id, scored) for scored in output.logprobs),
        ]
        pieces = self._pieces.get(index)
        if pieces is None:
            pieces = self._pieces[index] = self._pieces_of(self.choices[index].request)
        offsets = []
        for token_id, _ in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(pieces.push(token_id))
        return Logprobs(
            tokens=[self.service.tokenizer.token_text(token_id) for token_id, _ in entries],
            token_logprobs=[None if each is None else finite(each.logprob) for _, each in entries],
            top_logprobs=[None if each is None else self._top(each) for _, each in entries],
            text_offset=offsets,
        )

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens first, then the token itself if it is not among them.

        OpenAI adds it, too.
        """
        found: dict[str, float] = {}
        likeliest = scored.top[: self.body.logprobs]  # `prompt_logprobs` may ask for more
        for token_id, logprob in (*likeliest, (scored.token_id, scored.logprob)):
            found.setdefault(self.service.tokenizer.token_text(token_id), finite(logprob))
        return found


def _mean_logprob(output: Output) -> float:
    """Return the mean over all generated tokens, those of a stop string included."""
    generated = (*output.logprobs, *output.cut_logprobs)
    if not generated:  # its time was over before its first token
        return -math.inf
    return sum(entry.logprob for entry in generated) / len(generated)
