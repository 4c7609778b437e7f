"""The answers of /v1/models."""

from typing import Literal

from pydantic import Field

from ropewalk.server.api.rope_schema import PositionsField
from ropewalk.server.api.strict_body import Body, is_none


class TierEntry(Body):
    """One tier of a deployment."""

    max_len: int = Field(examples=[512])
    """The longest context of the tier, in tokens."""
    factor: float = Field(examples=[2.0])
    """Its factor."""
    rope_type: str = Field(examples=["yarn"])
    """Its method. `default` is the native table."""
    positions: PositionsField | None = Field(None, exclude_if=is_none)
    """Its position method. Absent if every key is read at its own position."""


class ModelMeta(Body):
    """Lengths under llama.cpp's names, which agents read."""

    n_ctx: int = Field(examples=[2048])
    """The longest context, in tokens."""
    n_ctx_train: int = Field(examples=[256])
    """The length that the checkpoint was trained for, in tokens."""


class ScalingEntry(Body):
    """The scaling of a deployment, and how its model writes calls."""

    original_max_position_embeddings: int = Field(examples=[256])
    """The native length, in tokens."""
    rope_type: str = Field(examples=["yarn"])
    """The method of a request that names none."""
    policy: str = Field(examples=["grow"])
    """The policy of a request that names none (docs/reference/rope.md#policies)."""
    tiers: list[TierEntry]
    """The tiers of a request without `rope`."""
    allowed_rope_types: list[str] = Field(examples=[["default", "yarn"]])
    """Methods that a request may name."""
    allowed_positions: list[str] | None = Field(
        None, exclude_if=is_none, examples=[["native", "rerope"]]
    )
    """Position methods that a request may name. Absent if there are none."""
    max_rope_factor: float = Field(examples=[8.0])
    """The largest factor that a request may name."""
    aliases: list[str] | None = Field(None, exclude_if=is_none, examples=[["gpt-4o"]])
    """Other names of the deployment. Absent if there are none."""
    kv_cache_dtype: str = Field(examples=["auto"])
    """The format of the server's cache (docs/guide/kv-cache.md)."""
    tool_format: str | None = Field(examples=["hermes"])
    """How the model writes calls (docs/guide/tools.md#formats). Null: requests with tools are
    refused."""
    reasoning: str | None = Field(examples=["<think>"])
    """The marker that opens the reasoning, or null if none is known."""


class CacheEntry(Body):
    """The server's cache, which all names share."""

    tokens: int = Field(examples=[16384])
    """Tokens of the whole cache."""
    bytes: dict[str, int] = Field(examples=[{"pages": 67108864}])
    """Bytes by part (docs/reference/metrics.md)."""


class Model(Body):
    """One served name, or one of its aliases."""

    id: str = Field(examples=["ropewalk-demo"])
    """The name."""
    root: str = Field(examples=["ropewalk-demo"])
    """The served name, which differs from the `id` of an alias."""
    object: Literal["model"] = "model"
    """The kind of the object."""
    created: int = Field(examples=[1764288000])
    """Unix time of the server's start."""
    owned_by: Literal["ropewalk"] = "ropewalk"
    """Always `ropewalk`."""
    max_model_len: int = Field(examples=[2048])
    """The longest context, in tokens."""
    meta: ModelMeta
    """Lengths under llama.cpp's names."""
    fingerprint: str | None = Field(None, exclude_if=is_none, examples=["4f2a90c1d3b7"])
    """Tells servers apart whose answers differ (docs/design/router.md#servers-that-differ). Absent
    without a `router_key`."""
    arithmetic: str | None = Field(None, exclude_if=is_none, examples=["1d3b74f2a90c"])
    """Tells servers apart whose bits differ. Absent without a `router_key`."""
    same_bits_in_any_batch: bool
    """Whether an answer has the same bits in any batch. False: within rounding, as on a GPU without
    `exact_batches`."""
    ropewalk: ScalingEntry
    """The scaling, and how the model writes calls."""
    kv_cache: CacheEntry
    """The cache, which may differ between servers behind a router."""


class ModelList(Body):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    """The kind of the object."""
    data: list[Model]
    """The served names, and then their aliases."""
