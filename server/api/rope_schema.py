"""The `rope` object: what a request asks for, and what an answer had."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field

from ropewalk.model_runtime.deployments.deployment import Placement, RopeRequest
from ropewalk.model_runtime.request import Timings
from ropewalk.rope import PositionMethod, Tier
from ropewalk.server.api.strict_body import Body, is_none

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


class TimingsAnswer(Body):
    """Tokens and milliseconds of the prompt and of the answer."""

    cache_n: int  # tokens of the prompt that were found in the prefix cache
    prompt_n: int  # the others, which were computed
    prompt_ms: float  # from the first step to the first token
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int  # tokens of the answer
    predicted_ms: float  # from the first token to the newest
    predicted_per_token_ms: float | None
    predicted_per_second: float | None

    @classmethod
    def of(cls, times: Timings, num_cached: int, num_prompt: int, num_generated: int) -> Self:
        """Build it from the engine's times and the counts of tokens."""
        num_computed = num_prompt - num_cached
        return cls(
            cache_n=num_cached,
            prompt_n=num_computed,
            predicted_n=num_generated,
            **_rates("prompt", num_computed, times.prefill_s),
            # The first token belongs to the prompt's time.
            **_rates("predicted", num_generated, times.decode_s, num_timed=num_generated - 1),
        )


def _rates(name: str, num: int, seconds: float, num_timed: int | None = None) -> Mapping[str, Any]:
    """Return the milliseconds, and both rates where there are any."""
    timed = num if num_timed is None else num_timed
    has_rate = timed > 0 and seconds > 0
    return {
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / timed, 3) if has_rate else None,
        f"{name}_per_second": round(timed / seconds, 3) if has_rate else None,
    }
