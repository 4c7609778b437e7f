"""Fields that mean the same in the bodies of several routes."""

from typing import Annotated, Literal

from pydantic import Field

from ropewalk.model_runtime.sampling_limits import INT64, SAMPLING_LIMITS
from ropewalk.server.api.rope_schema import RopeField
from ropewalk.server.api.strict_body import Body, Few
from ropewalk.server.settings.request_sections import largest

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ModelField(Body):
    """The field of every body that concerns a model."""

    model: str | None = Field(None, max_length=256, examples=["ropewalk-demo"])
    """A served name, or one of its aliases (`model_aliases`). The answer has the served name. Other
    names get 404. Default: the first deployment."""


class RequestFields(ModelField):
    """The fields of every body that generates, in whichever words the rest of it is."""

    temperature: float | None = Field(None, **SAMPLING_LIMITS["temperature"].bounds, examples=[0.7])
    """0 selects the most likely token. Default: that of the model's `generation_config`, or 1."""
    top_p: float | None = Field(None, **SAMPLING_LIMITS["top_p"].bounds, examples=[0.9])
    """Keeps the most likely tokens that together reach this probability. Default: that of the
    model's `generation_config`, or 1."""
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, examples=[7])
    """The same seed gives the same tokens in any batch, on a GPU within rounding. Default: a random
    one."""
    stream: bool | None = None
    """The response is a stream of server-sent events (docs/reference/api.md#streams). Default:
    false."""
    cache_salt: str | None = Field(None, max_length=128, examples=["tenant-1"])
    """Requests with different salts never share cached prefixes (vLLM's field). Neither do those of
    API keys with different names (docs/guide/securing.md#api-keys)."""
    max_time: float | None = Field(None, gt=0, le=largest("max_request_seconds"), examples=[30])
    """Seconds from the arrival of the whole body to the end. An answer that has begun then ends
    with what it has, and `finish_reason` is `length`. A request without a token gets 408 with the
    code `request_timeout`. At most, and by default, the setting `max_request_seconds`."""
    rope: RopeField | None = None
    """The scaling of this request. Default: the deployment's."""


class PromptCacheOptions(Body):
    """OpenAI's `prompt_cache_options`, a hint without effect: every prefix is cached."""

    mode: Literal["implicit", "explicit"] | None = None
    """A hint without effect."""
    ttl: str | None = Field(None, max_length=16, examples=["1h"])
    """A hint without effect."""


class HintFields(Body):
    """Hints of OpenAI's clients, which change nothing here."""

    user: str | None = Field(None, max_length=512, examples=["user-1"])
    """A hint without effect."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Few(16)] | None = Field(
        None, examples=[{"run": "7"}]
    )
    """A hint without effect."""
    prompt_cache_key: str | None = Field(None, max_length=1024, examples=["key-1"])
    """A hint without effect. Every prefix is cached."""
    prompt_cache_options: PromptCacheOptions | None = None
    """A hint without effect. Every prefix is cached."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """A hint without effect. Every prefix is cached."""
    safety_identifier: str | None = Field(None, max_length=512, examples=["user-1"])
    """A hint without effect."""
