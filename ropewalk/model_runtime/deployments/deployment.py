"""Choose the tiers of each request to a served name, or say what would fit.

Several deployments share one set of weights and one cache. All tables of a deployment are fixed
when it is created, so clients cannot increase the number of tables and cache keys.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ropewalk.model_runtime.errors import ContextLengthError, RequestError
from ropewalk.rope import (
    OTHER_POLICY_NAMES,
    POLICIES,
    POSITION_METHODS,
    Policy,
    PositionMethod,
    Tier,
    choose_tier,
    longest,
)


@dataclass(frozen=True, slots=True)
class RopeRequest:
    """The `rope` object of a request; None: the deployment's own."""

    rope_type: str | None = None
    factor: float | None = None  # at least this; raised to the next tier
    policy: str | None = None
    original_len: int | None = None  # only compared: the length that factors are multiples of
    positions: Mapping[str, Any] | None = None  # a method, and its parameters as answers have them
    is_exact: bool = False  # the factor is that of the table, at every length


@dataclass(frozen=True, slots=True)
class TierChoice:
    """The tier and policy of one request, as reported to the client."""

    deployment: str
    tier: Tier  # the one it starts on, which covers the prompt
    higher_tiers: tuple[Tier, ...]  # those its answer may grow to, ascending
    policy: Policy
    requested_factor: float | None
    original_len: int  # the length that factors are multiples of
    is_exact: bool = False  # whether the request named its table's factor exactly
    # Those of a prompt's first positions, ascending; `by_position` alone has some.
    lower_tiers: tuple[Tier, ...] = ()

    @property
    def prompt_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of its prompt's positions, ascending."""
        return (*self.lower_tiers, self.tier)

    @property
    def all_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of its positions, ascending."""
        return (*self.prompt_tiers, *self.higher_tiers)

    def tier_covering(self, num_tokens: int) -> Tier:
        """Return the lowest tier of a growing request that covers its tokens."""
        for tier in self.all_tiers:
            if tier.ceiling >= num_tokens:
                return tier
        raise AssertionError("admission lets nothing in that the last tier does not cover")


class Tiers(NamedTuple):
    """The tiers of one method, of scaling or of positions, that requests may name."""

    ascending: tuple[Tier, ...]
    exact: tuple[Tier, ...] = ()  # further ones, for requests that name a factor exactly
    # Whether it is `default` up to L only: the operator does not allow it, but the first tier is
    # the native table. Short answers report it, and clients send that back.
    is_native_only: bool = False


class _AllowedTiers(NamedTuple):
    """The tiers that a request's `rope` object leaves."""

    requested: RopeRequest
    policy: Policy
    tiers: tuple[Tier, ...]  # ascending
    at_least: float  # the least factor


@dataclass(frozen=True, slots=True)
class Deployment:
    """One served name. Made by `make_deployment` (its own file)."""

    name: str
    rope_type: str  # the default method
    policy: Policy
    # By rope_type and, for requests with `positions`, by position method. No name is both.
    tiers: Mapping[str, Tiers]
    native_len: int  # L
    original_len: int  # factors are multiples of it: L, or less if scaling is trained in
    max_rope_factor: float
    max_len: int  # positions of the longest request on any tier; advertised as max_model_len
    overridable: bool  # whether requests may choose a policy
    is_cache_limited: bool = False  # whether max_len is the size of the KV cache
    note: str | None = None  # what an operator should know about it

    @property
    def method_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of the default method, ascending."""
        return self.tiers[self.rope_type].ascending

    @property
    def own_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of a request without `rope`: under `fixed`, only the longest."""
        return self.method_tiers[-1:] if self.policy == "fixed" else self.method_tiers

    @property
    def position_method(self) -> PositionMethod | None:
        """Return the default position method; None: every key is at its own position."""
        return self.method_tiers[-1].profile.positions

    @property
    def rope_types(self) -> list[str]:
        """Return the scaling methods that requests may name at any length, sorted."""
        names = self.tiers.keys() - set(POSITION_METHODS)
        return sorted(name for name in names if not self.tiers[name].is_native_only)

    @property
    def position_methods(self) -> list[str]:
        """Return the position methods that requests may name, sorted."""
        return sorted(self.tiers.keys() & set(POSITION_METHODS))

    @property
    def serves_default_within_native(self) -> bool:
        return "default" in self.tiers and self.tiers["default"].is_native_only

    def within_cache(
        self, num_positions: int, *, num_step_tokens: int = 0, room: int | None = None
    ) -> "Deployment":
        """Return the deployment with requests no longer than the KV cache.

        One limit then decides, so a client never has to know what the limit comes from. Requests
        that release pages while they run may be longer (`sinks`). A step adds at most
        `num_step_tokens` to the pages that they hold. `room`: the positions that they may hold
        beside layers with a window; None: num_positions.
        """
        kept = self.num_kept
        room = num_positions if room is None else room
        releases = kept is not None and room >= kept + num_step_tokens
        if releases or num_positions >= self.max_len:
            return self
        return replace(self, max_len=num_positions, is_cache_limited=True)

    @property
    def num_kept(self) -> int | None:
        """Return the most positions that an own request holds once it releases pages; None: all."""
        method = self.position_method
        if method is None or method.kept is None:
            return None
        num_first, num_last = method.kept
        return num_first + max([num_last, *(tier.ceiling for tier in self.method_tiers[:-1])])

    def choose(self, requested: RopeRequest, num_prompt_tokens: int, max_tokens: int) -> TierChoice:
        """Return the tier a request starts on, and the tiers it may grow to.

        Raises RequestError if the `rope` object is not allowed, ContextLengthError if the request
        does not fit.
        """
        allowed = self._allowed(requested)
        return self._choose(allowed, num_prompt_tokens, max_tokens, is_open=False)

    def choose_open(
        self, requested: RopeRequest, num_prompt_tokens: int, most: int | None = None
    ) -> tuple[int, TierChoice]:
        """Return max_tokens and the choice for a request that leaves max_tokens out.

        Its answer may run to the longest context, or have `most` tokens. Raises what `choose` does;
        errors name no max_tokens.
        """
        allowed = self._allowed(requested)
        # The last token is never read back, so it needs no position.
        max_tokens = max(1, self._end(allowed) - num_prompt_tokens + 1)
        if most is not None:
            max_tokens = min(max_tokens, most)
        return max_tokens, self._choose(allowed, num_prompt_tokens, max_tokens, is_open=True)

    def longest_prompt(self, requested: RopeRequest, max_tokens: int | None) -> int:
        """Return the tokens of the longest prompt that leaves room for an answer.

        `max_tokens`: of the answer; None: an eighth of L. Raises RequestError as `choose` does.
        """
        wanted = self.native_len // 8 if max_tokens is None else max_tokens
        return self._end(self._allowed(requested)) - max(0, wanted - 1)

    def _end(self, allowed: _AllowedTiers) -> int:
        """Return the positions of the longest request."""
        return min(longest(allowed.tiers), self.max_len)

    def _choose(
        self, allowed: _AllowedTiers, num_prompt_tokens: int, max_tokens: int, *, is_open: bool
    ) -> TierChoice:
        requested, policy, tiers, at_least = allowed
        factor = requested.factor
        num_covered = num_prompt_tokens + max(0, max_tokens - 1)
        tier = choose_tier(tiers, num_prompt_tokens, num_covered, at_least)
        if num_covered > self.max_len or tier is None:
            raise self._too_long(allowed, num_prompt_tokens, max_tokens, is_open=is_open)
        if factor is not None and not self._may_have(factor, tier, policy):
            raise self._refused_factor(requested, factor, tiers)
        higher = tuple(each for each in tiers if each.ceiling > tier.ceiling)
        lower = tuple(
            each
            for each in tiers
            if policy == "by_position" and each.ceiling < tier.ceiling and each.factor >= at_least
        )
        return TierChoice(
            self.name, tier, higher, policy, factor, self.original_len, requested.is_exact, lower
        )

    def _allowed(self, requested: RopeRequest) -> _AllowedTiers:
        """Return the policy, the tiers and the least factor of a request. Raises RequestError."""
        if requested.original_len not in (None, self.original_len):
            raise RequestError(
                "`rope.original_max_position_embeddings` is only reported, and must be "
                f"{self.original_len}. Given: {requested.original_len}",
                param="rope.original_max_position_embeddings",
            )
        policy, of_method = self._policy(requested), self._tiers(requested)
        tiers, factor = of_method.ascending, requested.factor
        if requested.is_exact:
            tiers = (self._exact_tier(requested, of_method),)
        if factor is not None and not 1.0 <= factor <= tiers[-1].factor:
            raise self._refused_factor(requested, factor, tiers)
        # Above the operator's limit it chooses nothing, and `_choose` compares it with the tier.
        chosen = None if factor is None or factor > self.max_rope_factor else factor
        if policy == "fixed":
            fitting = tuple(tier for tier in tiers if tier.factor >= (chosen or 1.0))
            tiers = tiers[-1:] if chosen is None else fitting[:1]
        return _AllowedTiers(requested, policy, tiers, chosen or 1.0)

    def _policy(self, requested: RopeRequest) -> Policy:
        if requested.policy is None:
            return self.policy
        accepted = POLICIES if self.overridable else (self.policy,)
        name = OTHER_POLICY_NAMES.get(requested.policy, requested.policy)
        for policy in accepted:
            if name == policy:
                return policy
        raise RequestError(
            f"`rope.policy` must be {_one_of(accepted)}. Given: {requested.policy}",
            param="rope.policy",
        )

    def _tiers(self, requested: RopeRequest) -> Tiers:
        """Return the tiers of the method that a request names. Raises RequestError."""
        if requested.positions is not None:
            return self._position_tiers(requested.positions, requested.rope_type)
        rope_type = requested.rope_type or self.rope_type
        if rope_type not in self.tiers or rope_type in POSITION_METHODS:
            raise RequestError(
                f"`rope.rope_type` must be {_one_of(self.rope_types)}. Given: {rope_type}",
                param="rope.rope_type",
            )
        return self.tiers[rope_type]

    def _position_tiers(self, positions: Mapping[str, Any], rope_type: str | None) -> Tiers:
        """Return the tiers of the method that `positions` name. Raises RequestError.

        The other fields are those that answers report. They must be the method's own, so that
        clients cannot increase the number of tables.
        """
        if rope_type not in (None, "default") and self.position_method is None:
            raise RequestError(
                "`rope.positions` go with `rope_type` default, the trained table. Given: "
                f"{rope_type}",
                param="rope.positions",
            )
        name, possible = str(positions.get("method")), self.position_methods
        if name not in possible:
            accepted = f"one of {', '.join(possible)} (allowed_positions)"
            if not possible:
                accepted = "absent, unless the operator allows methods with allowed_positions"
            raise RequestError(
                f"`rope.positions.method` must be {accepted}. Given: {name}",
                param="rope.positions.method",
            )
        method = self.tiers[name].ascending[-1].profile.positions
        own = {"method": name} if method is None else method.described()
        for field, value in positions.items():
            if field not in own or own[field] != value:
                known = f"must be {own[field]}" if field in own else "is not a field of this method"
                raise RequestError(
                    f"`rope.positions.{field}` {known}, as the server has it. Given: {value}",
                    param=f"rope.positions.{field}",
                )
        return self.tiers[name]

    def _exact_tier(self, requested: RopeRequest, tiers: Tiers) -> Tier:
        """Return the tier of exactly the factor of a request. Raises RequestError."""
        factor = requested.factor or 1.0
        if factor > self.max_rope_factor:
            raise self._refused_factor(requested, factor, tiers.ascending)
        found = {tier.factor: tier for tier in (*tiers.exact, *tiers.ascending)}
        if factor not in found:
            factors = sorted(each for each in found if each <= self.max_rope_factor)
            raise RequestError(
                f"`rope.factor` must be {_one_of([f'{each:g}' for each in factors])} with `exact` "
                f"(rope_tiers, exact_rope_factors). Given: {factor:g}",
                param="rope.factor",
            )
        return found[factor]

    def _may_have(self, factor: float, tier: Tier, policy: Policy) -> bool:
        """Return whether a request with a factor may have its tier.

        A factor above max_rope_factor may name the tier that the request has without it, because
        answers report that factor and clients send it back.
        """
        if factor <= self.max_rope_factor:
            return True
        return factor == tier.factor if policy == "fixed" else factor <= tier.factor

    def _refused_factor(
        self, requested: RopeRequest, factor: float, tiers: Sequence[Tier]
    ) -> RequestError:
        """Build the error of a factor that the request may not have."""
        highest = min(self.max_rope_factor, tiers[-1].factor)
        accepted = f"between 1 and {highest:g}"
        if tiers[-1].factor == 1:
            accepted = f"1 under `rope_type` {requested.rope_type or self.rope_type}"
        elif highest == 1:
            accepted = "1 (max_rope_factor)"
        return RequestError(
            f"`rope.factor` must be {accepted}. Given: {factor:g}", param="rope.factor"
        )

    def _too_long(
        self, allowed: _AllowedTiers, num_prompt_tokens: int, max_tokens: int, *, is_open: bool
    ) -> RequestError:
        """Build the error with the numbers, the limit that was hit, and what would fit."""
        requested, tiers, own = allowed.requested, allowed.tiers, self.method_tiers
        num_covered = num_prompt_tokens + max(0, max_tokens - 1)
        if self._tiers(requested).is_native_only:
            if num_covered <= self.max_len:
                return self._beyond_native(num_covered)
            tiers = own  # the request is too long for these, too
        limit = min(longest(tiers), self.max_len)
        fits = float(math.ceil(num_covered / self.original_len))
        if num_covered <= longest(own):
            fits = min(fits, own[-1].factor)  # the longest tier may end at a fraction of L
        given = f"{num_prompt_tokens} prompt tokens"
        if not is_open:
            total = num_prompt_tokens + max_tokens
            given = (
                f"{total} tokens ({num_prompt_tokens} in the prompt and max_tokens {max_tokens}), "
                f"of which all but the last take a position, {num_covered} in all"
            )
        message = (
            f"This model's maximum context length is {limit} tokens ({self._limit(tiers)}). "
            f"However, your request has {given}. {self._remedy(num_covered, fits)}"
        )
        is_prompt_too_long = num_prompt_tokens > limit
        if not is_prompt_too_long:
            message += f" max_tokens may be at most {limit - num_prompt_tokens + 1}."
        details = {
            "n_prompt_tokens": num_prompt_tokens,
            "max_tokens": None if is_open else max_tokens,
            "n_ctx": limit,
            "rope": {
                "rope_type": requested.rope_type or self.rope_type,
                "factor": own[-1].factor if requested.factor is None else tiers[-1].factor,
                "factor_that_fits": fits,
            },
        }
        return ContextLengthError(
            message,
            param="prompt" if is_prompt_too_long else "max_tokens",
            code="context_length_exceeded",
            details=details,
        )

    def _beyond_native(self, num_covered: int) -> RequestError:
        """Build the error of a request that names `default` and is longer than L."""
        return RequestError(
            "`rope.rope_type` default is served within the native length "
            f"({self.method_tiers[0].ceiling} tokens) only, because the operator does not allow it "
            f"beyond (allowed_rope_types). Your request is {num_covered} positions. Beyond, the "
            f"field must be one of {', '.join(self.rope_types)}.",
            param="rope.rope_type",
        )

    def _limit(self, tiers: Sequence[Tier]) -> str:
        """Return the limit on a request that may have some tiers, in words."""
        factor, method = self.method_tiers[-1].factor, tiers[-1].profile.positions
        if longest(tiers) < self.max_len:
            if method is not None:
                return f"the reach of {method.method}"
            return f"the requested factor {tiers[-1].factor:g}"
        if self.is_cache_limited:
            return "the size of the KV cache"
        if self.max_len < longest(self.method_tiers) or method is not None:
            return "max_model_len"
        return "the trained length" if factor == 1 else f"the longest tier, of factor {factor:g}"

    def _remedy(self, num_covered: int, fits: float) -> str:
        """Return the sentence about the change with which a request would fit."""
        if self.position_method is not None:
            return "A larger max_model_len would fit it, as far as the position method reaches."
        factor = f"A rope factor of {fits:g} ({round(fits * self.original_len)} tokens) would fit"
        if num_covered <= self.max_len:
            allowed = fits <= self.max_rope_factor
            return (
                f"{factor}, if it were {'requested' if allowed else 'allowed (max_rope_factor)'}."
            )
        own_len = longest(self.method_tiers)
        size = " with a larger KV cache" if self.is_cache_limited else ""
        if not size and self.max_len < own_len:
            size = " with a larger max_model_len"
        if num_covered <= own_len:
            return f"It would fit, if the server were configured{size}."
        return f"{factor}, if the server were configured for it{size and ' and'}{size}."


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
