"""Bodies of the HTTP interface. A field is used or refused, never ignored.

Strict: a number in quotes is not a number. NaN and Infinity are refused wherever they stand.
"""

import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from model_runtime.deployment import Placement, RopeRequest
from model_runtime.request import SamplingParams
from model_runtime.sampler import MAX_LOGPROBS

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


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT64)]], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
# Fields of OpenAI's that are accepted only at the value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
}


def _unusable(param: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("unusable", problem, {"param": param})


class CompletionRequest(_Body):
    """POST /v1/completions."""

    model: str | None = Field(None, max_length=256)
    prompt: str | TokenIds
    max_tokens: int | None = Field(None, ge=0, le=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT64)
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    rope: RopeField | None = None
    n: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _refuse_unusable(self) -> Self:
        for name, values in _NEUTRAL.items():
            if getattr(self, name) not in values:
                raise _unusable(name, "is not supported yet, remove it")
        if self.stream_options is not None and not self.stream:
            raise _unusable("stream_options", "needs `stream`: true")
        if self.max_tokens == 0 and not self.echo:
            raise _unusable("max_tokens", "0 needs `echo`: true, or there is nothing to answer")
        return self

    def sampling(self) -> SamplingParams:
        """As the runtime takes it; OpenAI's defaults where nothing was said."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=stop,
            ignore_eos=self.ignore_eos,
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
    def of(cls, placement: Placement) -> Self:
        """From what was decided at admission; fixed and pinned never change it."""
        return cls(
            rope_type=placement.rope_type,
            factor=placement.tier.factor,
            requested_factor=placement.requested_factor,
            original_max_position_embeddings=placement.native_len,
            policy=placement.policy,
            rescaled=0,
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


class Usage(_Body):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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
