"""Bodies of POST /v1/completions."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ropewalk.model_runtime.request import MAX_LOGPROBS
from ropewalk.server.api.generation_schema import NEUTRAL, GenerationRequest, TokenId
from ropewalk.server.api.parts.logprobs import PROMPT_LOGPROBS, Logprobs, PromptLogprobs
from ropewalk.server.api.parts.usage import AnswerHead, PromptProgressAnswer, TimingsAnswer, Usage
from ropewalk.server.api.rope_schema import INT64, RopeAnswer
from ropewalk.server.api.strict_body import Body, FirstMistakes, InPieces, is_none
from ropewalk.server.settings.request_sections import largest

_MAX_PROMPTS = 64
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
    ) = Field(examples=["Once upon a time"])
    """A text, token ids, or a list of either with at most 64 prompts. The server
    adds special tokens to a string (`add_special_tokens`), not to token ids."""
    add_special_tokens: bool | None = None
    """Adds the special tokens in front of a string (vLLM's field). A string that begins with them
    itself, such as `<s>`, has them once. Default: true."""
    max_tokens: int | None = Field(None, ge=0, le=INT64, examples=[100])
    """The most tokens of an answer. 0 needs `echo`. Default: 16."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, examples=[3])
    """Number of alternatives per token, at most 20. The values are natural
    logarithms of the probabilities under the raw logits."""
    echo: bool | None = None
    """The text begins with the prompt. With `logprobs`, the logprobs include those of the prompt.
    Default: false."""
    best_of: int | None = Field(None, ge=1, le=largest("max_n"), examples=[4])
    """Number of computed answers, from `n` to `max_n` (16). The `n` with the highest mean
    log-probability of a token are returned, best first. Above `n`, it cannot be streamed. `usage`
    counts all computed answers. Default: `n`."""
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
    """Index of the answer. The answers of the first prompt come first."""
    text: str = Field(examples=[" there was"])
    """The text, or the next piece of it in a stream. An incomplete character at the end of an
    answer is left out, and so is U+FFFD, because the two cannot be distinguished."""
    logprobs: Logprobs | None = None
    """The logprobs of the text's tokens, or null."""
    finish_reason: str | None = Field(None, examples=["stop"])
    """`stop` (an end token or a stop string), `length` (`max_tokens`, the end of the tier, or the
    end of `max_time`), or null while the answer goes on."""
    rope: RopeAnswer
    """The scaling that was applied."""
    prompt_logprobs: PromptLogprobs | None = Field(
        None, exclude_if=is_none, examples=[PROMPT_LOGPROBS]
    )
    """For each token of the prompt an object by token id, and null for the first. Absent without
    `prompt_logprobs`."""
    token_ids: list[int] | None = Field(None, exclude_if=is_none, examples=[[220, 290]])
    """The tokens of the text. Absent without `return_token_ids`."""
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none, examples=[[1, 50]])
    """The tokens of the prompt, in the first event of a stream. Absent without
    `return_token_ids`."""


class CompletionResponse(AnswerHead):
    """The answer of /v1/completions, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    """The kind of the object."""
    choices: list[Choice]
    """The answers, or none in an event that has counts or progress only."""
    usage: Usage | None = None
    """Token counts. In a stream, null without `stream_options`."""
    timings: TimingsAnswer | None = Field(None, exclude_if=is_none)
    """Times of the answer. Absent without `timings_per_token`."""
    prompt_progress: PromptProgressAnswer | None = Field(None, exclude_if=is_none)
    """How far a long prompt is, in an event of a stream. Absent without `return_progress`."""
