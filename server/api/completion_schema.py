"""Bodies of POST /v1/completions."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ropewalk.server.api.generation_schema import (
    NEUTRAL,
    GenerationRequest,
    PromptProgressAnswer,
    TokenId,
    Usage,
)
from ropewalk.server.api.rope_schema import INT64, RopeAnswer, TimingsAnswer
from ropewalk.server.api.strict_body import Body, FirstMistakes, InPieces, is_none
from ropewalk.server.api.structured_schema import Logprobs, PromptLogprobs
from ropewalk.server.settings.request_sections import largest

_MAX_PROMPTS = largest("max_prompts")
DEFAULT_MAX_TOKENS = 16  # OpenAI's default
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), FirstMistakes, InPieces]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    id_prefix: ClassVar[str] = "cmpl-"
    prompt_field: ClassVar[str] = "prompt"
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NEUTRAL, "suffix": (None, "")}
    instead: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.instead,
        "messages": "`prompt` (`messages` is a field of /v1/chat/completions)",
    }

    prompt: (
        str
        | TokenIds
        | Annotated[
            list[str], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True), FirstMistakes
        ]
        | Annotated[
            list[TokenIds],
            Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True),
            FirstMistakes,
        ]
    )
    add_special_tokens: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=INT64)
    logprobs: int | None = Field(None, ge=0, le=largest("max_logprobs"))
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=largest("max_n"))
    suffix: str | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a field and its problem for each conflict."""
        yield from super().conflicts()
        if self.max_tokens == 0 and not self.echo:
            yield ("max_tokens", "of 0 needs `echo`: true, or there is nothing to answer")
        if self.num_answers < (self.n or 1):
            yield ("best_of", f"must be >= `n` ({self.n})")
        if self.picks_best and self.stream:
            yield ("best_of", "cannot be streamed: which answer is best shows at the end")
        if self.picks_best and self.max_tokens == 0:
            yield ("best_of", "needs `max_tokens` >= 1")

    @property
    def asked_max_tokens(self) -> int:
        """Return the requested limit, or OpenAI's default of 16."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_answers(self) -> int:
        """Return the number of candidates; `n` of them are returned."""
        return self.n or 1 if self.best_of is None else self.best_of

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    @property
    def answers_field(self) -> str:
        return "n" if self.best_of is None else "best_of"

    @property
    def picks_best(self) -> bool:
        return self.num_answers > (self.n or 1)

    @property
    def num_logprobs(self) -> int | None:
        """Return the requested number; candidates are compared by their logprobs."""
        return 0 if self.logprobs is None and self.picks_best else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((each for each in asked if each is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Choice(Body):
    """One answer, or one piece of it in a stream."""

    index: int = 0
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    rope: RopeAnswer
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=is_none)
    token_ids: list[int] | None = Field(None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)


class CompletionResponse(Body):
    """The answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    timings: TimingsAnswer | None = Field(None, exclude_if=is_none)
    prompt_progress: PromptProgressAnswer | None = Field(None, exclude_if=is_none)
