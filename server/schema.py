"""Bodies of the HTTP interface. A field is used or refused, never ignored.

Strict: a number in quotes is not a number. NaN and Infinity are refused wherever they stand.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from model_runtime.deployment import Placement, RopeRequest
from model_runtime.request import SamplingParams
from model_runtime.sampler import MAX_LOGPROBS
from rope import Tier

_INT64 = 2**63 - 1


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class RopeField(_Body):
    """The `rope` object of a request."""

    rope_type: str | None = Field(None, max_length=32)
    factor: float | None = Field(None, ge=1, le=1e6)
    policy: str | None = Field(None, max_length=32)

    def request(self) -> RopeRequest:
        """As the runtime takes it."""
        return RopeRequest(self.rope_type, self.factor, self.policy)


class StreamOptions(_Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


TokenId = Annotated[int, Field(ge=0, le=_INT64)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenIdKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,17})$")]  # JSON's keys are strings
StopString = Annotated[str, Field(min_length=1, max_length=256)]
_MAX_PROMPTS, _MAX_N = 64, 16
# Fields of OpenAI's that are accepted only at the value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (None, 1), "suffix": (None, "")}


def _unusable(param: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("unusable", problem, {"param": param})


class CompletionRequest(_Body):
    """POST /v1/completions."""

    model: str | None = Field(None, max_length=256)
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0, le=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0, le=_INT64)
    n: int | None = Field(None, ge=1, le=_MAX_N)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    cache_salt: str | None = Field(None, max_length=128)
    rope: RopeField | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _refuse_unusable(self) -> Self:
        for name, values in _NEUTRAL.items():
            if getattr(self, name) not in values:
                raise _unusable(name, "is not supported yet, remove it")
        if self.stream_options is not None and not self.stream:
            raise _unusable("stream_options", "needs `stream`: true")
        if self.max_tokens == 0 and not self.echo:
            raise _unusable("max_tokens", "0 needs `echo`: true, or there is nothing to answer")
        if (self.min_tokens or 0) > (16 if self.max_tokens is None else self.max_tokens):
            raise _unusable("min_tokens", "must be <= `max_tokens`")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts as a list."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def logit_bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """(token id, what is added to its logit)."""
        return tuple((int(token), value) for token, value in (self.logit_bias or {}).items())

    def sampling(self, defaults: Mapping[str, float], copy: int) -> SamplingParams:
        """As the runtime takes it. What was left out is the model's default, or OpenAI's.

        `copy` counts a prompt's answers: each has a seed of its own.
        """

        def value(name: str, default: float) -> float:
            given: float | None = getattr(self, name)
            return defaults.get(name, default) if given is None else given

        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            temperature=value("temperature", 1.0),
            top_p=value("top_p", 1.0),
            top_k=max(int(value("top_k", 0)), 0),
            min_p=value("min_p", 0.0),
            seed=secrets.randbits(63) if self.seed is None else self.seed + copy,
            repetition_penalty=value("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias_pairs(),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens or 0,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class TokenizeRequest(_Body):
    """POST /tokenize."""

    model: str | None = Field(None, max_length=256)
    prompt: str
    add_special_tokens: bool = True


class TokenizeResponse(_Body):
    """How a text looks to the model."""

    count: int
    max_model_len: int
    tokens: list[int]


class RopeAnswer(_Body):
    """What was applied to one choice."""

    rope_type: str
    factor: float
    requested_factor: float | None
    original_max_position_embeddings: int
    policy: str
    rescaled: int  # how often the table changed while the request ran

    @classmethod
    def of(cls, placement: Placement, tier: Tier, num_rescales: int) -> Self:
        """From what was decided at admission, and the tier in force now."""
        return cls(
            rope_type=tier.profile.scaling.rope_type,
            factor=tier.factor,
            requested_factor=placement.requested_factor,
            original_max_position_embeddings=placement.original_len,
            policy=placement.policy,
            rescaled=num_rescales,
        )


class Logprobs(_Body):
    """The classic completions shape."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(_Body):
    """One answer, or one piece of it in a stream."""

    index: int = 0
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    rope: RopeAnswer


class PromptTokensDetails(_Body):
    """Where the prompt's keys and values came from."""

    cached_tokens: int  # read from the prefix cache


class Usage(_Body):
    """Token counts; a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionResponse(_Body):
    """The answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Model(_Body):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ropewalk"] = "ropewalk"
    max_model_len: int


class ModelList(_Body):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
