"""Shared parts of the bodies that generate: their fields and usage."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.request import PromptProgress, SamplingParams
from ropewalk.model_runtime.sampling_limits import SAMPLING_LIMITS
from ropewalk.server.api.rope_schema import INT64, RopeField
from ropewalk.server.api.strict_body import Body, FirstMistakes, few, is_none
from ropewalk.server.api.structured_schema import AnswerFields
from ropewalk.server.errors import MAX_ERRORS
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.request_sections import largest


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None,
        description="With `include_usage`, each event with a choice has the token counts of that "
        "choice so far (vLLM's field).",
        examples=[True],
    )
    include_obfuscation: bool | None = None


class PromptCacheOptions(Body):
    """OpenAI's `prompt_cache_options`, a hint without effect: every prefix is cached."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = Field(None, max_length=16)


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=INT64)]
TokenIdKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,17})$")]  # JSON's keys are strings
StopString = Annotated[str, Field(min_length=1, max_length=largest("max_stop_chars"))]

# Neutral in every generating request; a route adds its own.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (None, False),
    "verbosity": (None, "medium"),
    "service_tier": (None, "auto", "default"),
    # vLLM's, and llama.cpp's last one.
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "spaces_between_special_tokens": (None, True),
    "return_tokens_as_token_ids": (None, False),
    "cache_prompt": (None, True),
}
_MAX_BAD_WORDS = 64


class GenerationRequest(AnswerFields):
    """The fields of every request that generates text."""

    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]  # the field named in errors about the prompt
    schema_field: ClassVar[str] = "response_format"  # the one in errors about the answer's schema

    model: str | None = Field(None, max_length=256)
    temperature: float | None = Field(None, **SAMPLING_LIMITS["temperature"].bounds)
    top_p: float | None = Field(None, **SAMPLING_LIMITS["top_p"].bounds)
    top_k: int | None = Field(None, **SAMPLING_LIMITS["top_k"].bounds)
    min_p: float | None = Field(None, **SAMPLING_LIMITS["min_p"].bounds)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    repetition_penalty: float | None = Field(None, **SAMPLING_LIMITS["repetition_penalty"].bounds)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]],
            few(largest("max_logit_bias")),
        ]
        | None
    ) = None
    stop: (
        StopString
        | Annotated[
            list[StopString],
            Field(max_length=largest("max_stop_strings"), fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = None
    stop_token_ids: (
        Annotated[
            list[TokenId],
            Field(max_length=largest("max_stop_token_ids"), fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=INT64)
    n: int | None = Field(None, ge=1, le=largest("max_n"))
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None  # llama.cpp's
    priority: int | None = Field(None, ge=-INT64 - 1, le=INT64)  # vLLM's
    user: str | None = Field(None, max_length=512)
    store: bool | None = None
    # Hints of OpenAI's clients, which change nothing here.
    metadata: Annotated[dict[MetadataKey, MetadataValue], few(16)] | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = Field(None, max_length=512)
    verbosity: str | None = None
    service_tier: str | None = None
    cache_salt: str | None = Field(None, max_length=128)
    # vLLM's.
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(max_length=_MAX_BAD_WORDS, fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT64)
    prompt_logprobs: int | None = Field(None, ge=0, le=largest("max_logprobs"))
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_prompt: bool | None = None
    rope: RopeField | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a field and its problem for each conflict between fields of both routes."""
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                yield name, "needs `stream`: true"
        if self.prompt_logprobs is not None and self.stream:
            yield "prompt_logprobs", "cannot be streamed, leave `stream` out"
        if self.timings_per_token and self.num_prompts * self.num_answers > 1:
            yield "timings_per_token", "needs one prompt and one answer"
        if self.truncate_prompt_tokens == 0:
            yield "truncate_prompt_tokens", "must be -1 or at least 1. Given: 0"
        yield from super().conflicts()
        asked = self.asked_answer
        if self.ignore_eos and asked is not None:
            is_format = asked.field == "response_format"
            what = "a `response_format` of JSON" if is_format else f"`{asked.field}`"
            yield "ignore_eos", f"cannot be true together with {what}"

    @property
    @abstractmethod
    def asked_max_tokens(self) -> int | None:
        """Return the max number of tokens of an answer; None: to the end of the tier."""

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens"

    def own_name(self, param: str | None) -> str | None:
        """Return this body's name of a field, which the runtime calls by one name in all bodies."""
        asked = self.asked_answer
        own_names = {
            "prompt": self.prompt_field,
            "max_tokens": self.max_tokens_field,
            "response_format": self.schema_field if asked is None else asked.field,
        }
        return own_names.get(param or "", param)

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Return the number of alternatives for each token of the answer; None: no logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def shows_special(self) -> bool:
        return self.skip_special_tokens is False

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_answers(self) -> int:
        """Return the number of answers to compute for each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def answers_field(self) -> str:
        return "n"

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_in_each(self) -> bool:
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    def logit_bias_pairs(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), value) for token, value in (self.logit_bias or {}).items())

    def sampling(self, defaults: Mapping[str, float], extra_stop: Sequence[str]) -> SamplingParams:
        """Return the runtime's sampling parameters, without max_tokens and seed.

        A field that the request leaves out has the model's default, or OpenAI's. `extra_stop` are
        the stop strings of the chat template.
        """

        def value(name: str, default: float) -> float:
            given: float | None = getattr(self, name)
            return defaults.get(name, default) if given is None else given

        stop = self.stop_strings
        return SamplingParams(
            temperature=value("temperature", 1.0),
            top_p=value("top_p", 1.0),
            top_k=max(int(value("top_k", 0)), 0),
            min_p=value("min_p", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias_pairs(),
            stop=(*stop, *extra_stop),
            shown_stop=frozenset(stop) if self.include_stop_str_in_output else None,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )

    def seeds(self) -> list[int | None]:
        """Return the seed of each answer to a prompt; None: the body names none."""
        if self.seed is None:
            return [None] * self.num_answers
        return [self.seed + copy for copy in range(self.num_answers)]


def check_limits(body: GenerationRequest, settings: ServeSettings, vocab_size: int) -> None:
    """Check the operator's limits and the token ids. Raises RequestError of all mistakes.

    The schema refuses only what no setting allows. The engine checks what its memory holds, and
    none of these.
    """
    stop, num_ids = body.stop_strings, len(body.stop_token_ids or ())
    num_logprobs = max(body.num_logprobs or 0, body.num_prompt_logprobs or 0)
    errors = [
        RequestError(f"`{param}` must be at most {most} {unit}. Given: {given}", param=param)
        for param, most, unit, given in (
            (body.prompt_field, settings.max_prompts, "prompts", body.num_prompts),
            (body.answers_field, settings.max_n, "answers", body.num_answers),
            ("stop", settings.max_stop_strings, "strings", len(stop)),
            ("stop", settings.max_stop_chars, "characters each", max(map(len, stop), default=0)),
            ("stop_token_ids", settings.max_stop_token_ids, "tokens", num_ids),
            ("logit_bias", settings.max_logit_bias, "tokens", len(body.logit_bias or ())),
            ("logprobs", settings.max_logprobs, "alternatives", num_logprobs),
        )
        if given > most
    ]
    unknown: dict[tuple[str, int], RequestError] = {}
    for param, ids in (
        ("logit_bias", [token_id for token_id, _ in body.logit_bias_pairs()]),
        ("stop_token_ids", body.stop_token_ids or ()),
    ):
        for token_id in ids:
            if token_id >= vocab_size and len(errors) + len(unknown) < MAX_ERRORS:
                unknown[param, token_id] = unknown_token(token_id, param, vocab_size)
    errors += unknown.values()
    if body.priority and settings.scheduling_policy == "fcfs":
        told = (
            "`priority` must be 0, because requests start in the order of their arrival "
            f"(scheduling_policy is fcfs). Given: {body.priority}"
        )
        errors.append(RequestError(told, param="priority"))
    if errors:
        raise RequestError("; ".join(map(str, errors[:MAX_ERRORS])), param=errors[0].param)


def unknown_token(token_id: int, param: str, vocab_size: int) -> RequestError:
    """Build the error of an id outside the vocabulary."""
    return RequestError(
        f"`{param}` token ids must be < {vocab_size}. Given: {token_id}", param=param
    )


class CompletionTokensDetails(Body):
    """The parts of the answers."""

    # Only for models whose reasoning is separated from the text.
    reasoning_tokens: int | None = Field(None, exclude_if=is_none)
    # Only for a request with `prediction`: tokens of drafts that were chosen, and the others.
    accepted_prediction_tokens: int | None = Field(None, exclude_if=is_none)
    rejected_prediction_tokens: int | None = Field(None, exclude_if=is_none)


class PromptTokensDetails(Body):
    """The source of the prompt's keys and values."""

    cached_tokens: int  # read from the prefix cache


class Usage(Body):
    """Token counts; a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(None, exclude_if=is_none)


class PromptProgressAnswer(Body):
    """How far a long prompt is, as llama.cpp tells it."""

    index: int  # of the prompt
    total: int  # tokens of the prompt
    cache: int  # those of them found in the prefix cache
    processed: int  # those done, the cached ones included
    time_ms: float  # since the prompt was started

    @classmethod
    def of(cls, index: int, progress: PromptProgress) -> Self:
        """Build it from the engine's numbers."""
        return cls(
            index=index,
            total=progress.num_prompt_tokens,
            cache=progress.num_cached_tokens,
            processed=progress.num_computed_tokens,
            time_ms=round(progress.seconds * 1000, 3),
        )
