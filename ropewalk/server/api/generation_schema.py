"""The fields of the older bodies that generate, and their limits by the operator's settings."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.request import MAX_LOGPROBS, SamplingParams
from ropewalk.model_runtime.sampling_limits import INT64, SAMPLING_LIMITS
from ropewalk.server.api.parts.request_fields import HintFields, RequestFields
from ropewalk.server.api.strict_body import Body, Few, FirstMistakes
from ropewalk.server.api.structured_schema import AnswerFields
from ropewalk.server.errors import MAX_ERRORS
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.request_sections import largest


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    """A last event has `usage` and no choices. Default: false."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`, each event with a choice has the token counts of that choice so far
    (vLLM's field). Default: false."""
    include_obfuscation: bool | None = None


TokenId = Annotated[int, Field(ge=0, le=INT64)]
TokenIdKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,17})$")]  # JSON's keys are strings
StopString = Annotated[str, Field(min_length=1, max_length=256)]

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
MAX_STOP_STRINGS = 64


class GenerationRequest(HintFields, AnswerFields, RequestFields):
    """The fields of every request that generates text."""

    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]  # the field named in errors about the prompt

    top_k: int | None = Field(None, **SAMPLING_LIMITS["top_k"].bounds, examples=[40])
    """Keeps this many of the most likely tokens. 0 and -1 turn it off (vLLM's field). Default: that
    of the model's `generation_config`, or off."""
    min_p: float | None = Field(None, **SAMPLING_LIMITS["min_p"].bounds, examples=[0.05])
    """Drops tokens with a probability below this fraction of the highest one (vLLM's field).
    Default: that of the model's `generation_config`, or 0."""
    repetition_penalty: float | None = Field(
        None, **SAMPLING_LIMITS["repetition_penalty"].bounds, examples=[1.1]
    )
    """Applies to the tokens of the prompt and the answer (vLLM's field). Default: that of the
    model's `generation_config`, or 1."""
    presence_penalty: float | None = Field(None, ge=-2, le=2, examples=[0.5])
    """Applies to the tokens of the answer. Default: 0."""
    frequency_penalty: float | None = Field(None, ge=-2, le=2, examples=[0.5])
    """Applies to the tokens of the answer, each time that they occur. Default: 0."""
    logit_bias: (
        Annotated[
            dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]],
            Few(1024),
        ]
        | None
    ) = Field(None, examples=[{"50": -100}])
    """Numbers to add to the logits, by token id. At most 1024 tokens."""
    stop: (
        StopString
        | Annotated[
            list[StopString],
            Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = Field(None, examples=[["\n\n"]])
    """The text ends before the stop string. At most 64 of at most 256 characters each."""
    stop_token_ids: (
        Annotated[
            list[TokenId],
            Field(max_length=128, fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = Field(None, examples=[[2]])
    """End tokens of this request (vLLM's field). At most 128."""
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, fail_fast=True), FirstMistakes] | None
    ) = Field(None, examples=[[5, 6, 7]])
    """No other token is sampled (vLLM's field). An end token ends the answer only if it is among
    them. Default: all tokens."""
    ignore_eos: bool | None = None
    """Generation continues after the model's end tokens (vLLM's field). Default: false."""
    min_tokens: int | None = Field(None, ge=0, le=INT64, examples=[8])
    """No end token and no stop string ends the answer before this many tokens (vLLM's field). At
    most `max_tokens`. Default: 0."""
    n: int | None = Field(None, ge=1, le=largest("max_n"), examples=[2])
    """Number of answers to each prompt, at most `max_n` (16). They share the prompt's pages. Their
    seeds are `seed`, `seed` + 1, and so on (as in vLLM). Default: 1."""
    stream_options: StreamOptions | None = None
    """Token counts in the events of a stream. Needs `stream`."""
    return_progress: bool | None = None
    """The stream reports the progress of the prefill (llama.cpp's field). Needs `stream`. Default:
    false."""
    timings_per_token: bool | None = None
    """The answer has `timings`, and so has each event of a stream (llama.cpp's field). Needs one
    prompt and one answer. Default: false."""
    priority: int | None = Field(None, ge=-INT64 - 1, le=INT64, examples=[0])
    """A request with a lower number starts earlier, and is preempted later (vLLM's field). Numbers
    other than 0 need the setting `scheduling_policy` `priority`. Default: 0."""
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$", examples=["order-42"])
    """The end of the answer's `id`, and the `X-Request-Id` of a request without that header (vLLM's
    field). 1 to 128 printable ASCII characters without spaces."""
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(max_length=_MAX_BAD_WORDS, fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = Field(None, examples=[["never"]])
    """Words that the answer must not contain, with and without a space before them (vLLM's field).
    If a grammar allows no other token, the token comes all the same."""
    include_stop_str_in_output: bool | None = None
    """The text contains the stop string that ended it (vLLM's field). It also contains an end
    token, if special tokens are shown. Default: false."""
    skip_special_tokens: bool | None = None
    """With false, the text contains its special tokens (vLLM's field). Default: true."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT64, examples=[512])
    """Keeps this many of the prompt's last tokens, and not 0 (vLLM's field). -1 keeps as many as
    leave room for `max_tokens`, or for an eighth of the native length. A text with more characters
    than fit the longest context gets 400 all the same."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, examples=[1])
    """Number of alternatives for each token of the prompt, at most 20 (vLLM's field). The answer
    has `prompt_logprobs`, a list of null and then objects by token id, with `logprob`,
    `decoded_token` and `rank`, which may be null. Cannot be streamed."""
    return_token_ids: bool | None = None
    """The choice has `token_ids` and `prompt_token_ids` (vLLM's field). In a stream, the first
    event of a choice has those of the prompt. Default: false."""
    store: bool | None = None
    verbosity: str | None = None
    service_tier: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_prompt: bool | None = None

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
            "response_format": "response_format" if asked is None else asked.field,
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
        """Return the runtime's sampling parameters.

        max_tokens, seed, bad_words and `allowed` are added later. A field that the request leaves
        out has the model's default, or OpenAI's. `extra_stop` are the stop strings of the chat
        template.
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
    errors = [
        RequestError(f"`{param}` must be at most {most} {unit}. Given: {given}", param=param)
        for param, most, unit, given in (
            (body.answers_field, settings.max_n, "answers", body.num_answers),
            ("max_time", settings.max_request_seconds, "seconds", body.max_time),
        )
        if given is not None and most is not None and given > most
    ]
    unknown: dict[tuple[str, int], RequestError] = {}
    for param, ids in (
        ("logit_bias", [token_id for token_id, _ in body.logit_bias_pairs()]),
        ("stop_token_ids", body.stop_token_ids or ()),
        ("allowed_token_ids", body.allowed_token_ids or ()),
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
    return RequestError(
        f"`{param}` token ids must be < {vocab_size}. Given: {token_id}", param=param
    )
