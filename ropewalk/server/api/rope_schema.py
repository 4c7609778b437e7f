"""The `rope` object: what a request asks for, and what an answer had."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field

from ropewalk.model_runtime.deployments.deployment import RopeRequest, TierChoice
from ropewalk.rope import PositionMethod, Tier
from ropewalk.server.api.strict_body import Body, is_none

INT64 = 2**63 - 1


class PositionsField(Body):
    """A position method. A request names the method, and its parameters are the server's.

    Parameters are accepted if they are those that answers report.
    """

    method: str = Field(max_length=32, examples=["rerope"])
    """The method's name (docs/reference/position-methods.md). A request may name those that the
    operator allows."""
    window: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none, examples=[128])
    """Tokens before a query that it reads at their own distance; of `string`, W."""
    group: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none, examples=[8])
    """Of `self_extend`: positions beyond the window that become one."""
    shift: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none, examples=[80])
    """Of `string`: tokens by which far positions are shifted."""
    sinks: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none, examples=[4])
    """Of `sinks`: first tokens that every query reads."""
    chunk_size: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none, examples=[256])
    """Of `dual_chunk`: tokens of a chunk and of the local part beside it."""
    local_size: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none, examples=[64])
    """Of `dual_chunk`: distance in tokens up to which distances are the true ones."""
    temperature_factor: float | None = Field(None, ge=0, le=1e6, exclude_if=is_none, examples=[1.0])
    """Of `dual_chunk`: factor of queries and keys in the rotated dimensions."""
    factor: float | None = Field(None, ge=0, le=1e6, exclude_if=is_none, examples=[1.0])
    """Of `string`: factor of the attention."""

    @classmethod
    def of(cls, method: PositionMethod | None) -> Self | None:
        return None if method is None else cls(**method.described())


class RopeField(Body):
    """The `rope` object of a request. That of an answer may be sent back unchanged."""

    instead: ClassVar[Mapping[str, str]] = {"type": "`rope_type`"}  # transformers' older name

    rope_type: str | None = Field(None, max_length=32, examples=["yarn"])
    """A method that the operator allows (docs/reference/rope.md). If `default` is not allowed, it
    is accepted within the native length, where short answers report it."""
    factor: float | None = Field(None, ge=1, le=1e6, examples=[2.0])
    """The tier covers at least this many times the native length. The server raises the factor to
    the next tier, unless `exact` is true. At most `max_rope_factor`, or the factor of the tier that
    the request has without it."""
    exact: bool | None = Field(None, examples=[False])
    """With true, the table has exactly this `factor`, at every length that it covers. The factor is
    that of a tier, or one of the setting `exact_rope_factors`. Others get 400, with the list."""
    positions: PositionsField | None = None
    """A position method (docs/reference/position-methods.md) that the operator allows, as
    `{"method": ...}`. Its parameters are the server's."""
    policy: str | None = Field(None, max_length=32, examples=["grow"])
    """`by_position`, `grow`, `grow-exact` or `fixed` (docs/reference/rope.md#policies). `pinned` is
    another name of `grow`. Under `fixed`, a `factor` selects the same tier at every length."""
    requested_factor: float | None = Field(None, ge=1, le=1e6, examples=[2.0])
    """A factor of an answer that is sent back, at most `factor`. If `rescaled` is there, it is the
    factor of the request under every policy but `fixed`."""
    original_max_position_embeddings: int | None = Field(None, ge=1, le=INT64, examples=[256])
    """The deployment's own length, in an answer that is sent back."""
    rescaled: int | None = Field(None, ge=0, le=INT64, examples=[0])
    """A number of an answer that is sent back; it chooses nothing by itself."""
    ended_by: Literal["tier", "max_model_len"] | None = None
    """A field of an answer that is sent back; it is ignored."""
    beyond_trained_length: bool | None = None
    """A field of an answer that is sent back; it is ignored."""
    same_bits_in_any_batch: bool | None = None
    """A field of an answer that is sent back; it is ignored."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield an exact factor that is missing, and one that the reported one is below."""
        if self.exact and self.factor is None:
            yield "exact", "needs `factor`"
        if self.requested_factor is not None and (self.factor or 0) < self.requested_factor:
            yield "requested_factor", "is only reported, use `factor`"

    def request(self) -> RopeRequest:
        """Return it in the runtime's format."""
        # An answer reports the factor of its last tier. As the least factor of the next request, it
        # would take the lower tiers from its first positions.
        is_echo = self.rescaled is not None and self.policy not in (None, "fixed")
        return RopeRequest(
            self.rope_type,
            self.requested_factor if is_echo and not self.exact else self.factor,
            self.policy,
            self.original_max_position_embeddings,
            None if self.positions is None else self.positions.model_dump(exclude_none=True),
            is_exact=bool(self.exact),
        )


class RopeAnswer(Body):
    """The scaling that was applied to one choice."""

    rope_type: str = Field(examples=["yarn"])
    """The method. `default` is the native table."""
    factor: float = Field(examples=[2.0])
    """The factor of the tier of the last token (docs/reference/rope.md#the-length-of-a-request), or
    1 under a position method. In a stream, each event has the tier so far."""
    requested_factor: float | None = Field(examples=[2.0])
    """The `factor` of the request, or null."""
    original_max_position_embeddings: int = Field(examples=[256])
    """L, the native length."""
    policy: str = Field(examples=["grow"])
    """The policy (docs/reference/rope.md#policies)."""
    rescaled: int = Field(examples=[0])
    """Number of table changes while the request ran. It is 0 under `fixed`."""
    ended_by: Literal["tier", "max_model_len"] | None = Field(None, exclude_if=is_none)
    """Present if the request had no `max_tokens` and the answer used all its room: `tier` if the
    longest tier is full, `max_model_len` if the context ends inside a tier. In a stream, the last
    event of the choice has it."""
    beyond_trained_length: Literal[True] | None = Field(None, exclude_if=is_none)
    """True if the prompt and the answer so far have more positions than the table is made for,
    otherwise absent. This can happen with `default` only. In a stream, every event has it if the
    prompt is so long, and otherwise the last event of the choice."""
    exact: Literal[True] | None = Field(None, exclude_if=is_none)
    """True if the request has it, otherwise absent."""
    positions: PositionsField | None = Field(None, exclude_if=is_none)
    """The position method (docs/reference/position-methods.md) and its parameters. Absent if every
    key is read at its own position."""
    same_bits_in_any_batch: bool
    """Whether tokens and logprobs are the same to the bit in any batch. False: within rounding, as
    on a GPU without `exact_batches`."""

    @classmethod
    def of(
        cls,
        tier_choice: TierChoice,
        tier: Tier,
        num_rescales: int,
        num_positions: int,
        ended_by: Literal["tier", "max_model_len"] | None = None,
        *,
        has_same_bits: bool,
    ) -> Self:
        """Build it from the decisions at admission, the tier in force and the positions so far."""
        return cls(
            rope_type=tier.profile.scaling.rope_type,
            factor=tier.factor,
            requested_factor=tier_choice.requested_factor,
            original_max_position_embeddings=tier_choice.original_len,
            policy=tier_choice.policy,
            rescaled=num_rescales,
            ended_by=ended_by,
            beyond_trained_length=tier.is_beyond(num_positions) or None,
            exact=tier_choice.is_exact or None,
            positions=PositionsField.of(tier.profile.positions),
            same_bits_in_any_batch=has_same_bits,
        )
