"""The `rope` object: what a request asks for, and what an answer had."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field

from model_runtime.deployment import Placement, RopeRequest
from rope import PositionMethod, Tier
from server.api.strict_body import Body, is_none

INT64 = 2**63 - 1


class PositionsField(Body):
    """A position method. A request names the method; its parameters are the server's.

    They are accepted if they are those that answers report.
    """

    method: str = Field(max_length=32)
    window: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none)
    group: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none)
    shift: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none)
    sinks: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none)
    chunk_size: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none)
    local_size: int | None = Field(None, ge=0, le=INT64, exclude_if=is_none)
    temperature_factor: float | None = Field(None, ge=0, le=1e6, exclude_if=is_none)
    factor: float | None = Field(None, ge=0, le=1e6, exclude_if=is_none)

    @classmethod
    def of(cls, method: PositionMethod | None) -> Self | None:
        return None if method is None else cls(**method.described())


class RopeField(Body):
    """The `rope` object of a request."""

    rope_type: str | None = Field(None, max_length=32)
    factor: float | None = Field(None, ge=1, le=1e6)
    policy: str | None = Field(None, max_length=32)
    # Only reported. A client may send back the object of an answer unchanged.
    requested_factor: float | None = Field(None, ge=1, le=1e6)
    original_max_position_embeddings: int | None = Field(None, ge=1, le=INT64)
    rescaled: int | None = Field(None, ge=0, le=INT64)
    ended_by: Literal["tier", "max_model_len"] | None = None
    beyond_trained_length: bool | None = None
    positions: PositionsField | None = None
    exact: bool | None = None  # the factor is the table's, not the least one

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield an exact factor that is missing, and one that the reported one is below."""
        if self.exact and self.factor is None:
            yield "exact", "needs `factor`"
        if self.requested_factor is not None and (self.factor or 0) < self.requested_factor:
            yield "requested_factor", "is only reported, use `factor`"

    def request(self) -> RopeRequest:
        """Return it in the runtime's format."""
        return RopeRequest(
            self.rope_type,
            self.factor,
            self.policy,
            self.original_max_position_embeddings,
            None if self.positions is None else self.positions.model_dump(exclude_none=True),
            is_exact=bool(self.exact),
        )


class RopeAnswer(Body):
    """The scaling that was applied to one choice."""

    rope_type: str
    factor: float
    requested_factor: float | None
    original_max_position_embeddings: int
    policy: str
    rescaled: int  # how often the table changed while the request ran
    # Set if an answer without max_tokens had no more room.
    ended_by: Literal["tier", "max_model_len"] | None = Field(None, exclude_if=is_none)
    # True if some positions are more than the table is made for; else absent.
    beyond_trained_length: Literal[True] | None = Field(None, exclude_if=is_none)
    exact: Literal[True] | None = Field(None, exclude_if=is_none)  # as requested
    # The position method in force; absent if every key is at its own position.
    positions: PositionsField | None = Field(None, exclude_if=is_none)

    @classmethod
    def of(
        cls,
        placement: Placement,
        tier: Tier,
        num_rescales: int,
        num_positions: int,
        ended_by: Literal["tier", "max_model_len"] | None = None,
    ) -> Self:
        """Build it from the decisions at admission, the tier in force and the positions so far."""
        return cls(
            rope_type=tier.profile.scaling.rope_type,
            factor=tier.factor,
            requested_factor=placement.requested_factor,
            original_max_position_embeddings=placement.original_len,
            policy=placement.policy,
            rescaled=num_rescales,
            ended_by=ended_by,
            beyond_trained_length=tier.is_beyond(num_positions) or None,
            exact=placement.is_exact or None,
            positions=PositionsField.of(tier.profile.positions),
        )
