"""A served model name, with its tiers, its policy and the placement of each request.

Several deployments share one set of weights and one cache. All tables of a deployment are fixed
when it is created, so clients cannot increase the number of tables and cache keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ropewalk.model_runtime.deployments.placement_errors import (
    beyond_native,
    refused_factor,
    too_long,
)
from ropewalk.model_runtime.deployments.position_tiers import asked_position_tiers
from ropewalk.model_runtime.errors import RequestError
from ropewalk.rope import OTHER_POLICY_NAMES, POLICIES, Policy, Tier, choose_tier, longest


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
class Placement:
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


class _Way(NamedTuple):
    """The ways to serve a request: those that its `rope` object leaves."""

    asked: RopeRequest
    policy: Policy
    tiers: tuple[Tier, ...]  # ascending
    at_least: float  # the least factor


@dataclass(frozen=True, slots=True)
class Deployment:
    """One served name. Made by `make_deployment` (its own file)."""

    name: str
    rope_type: str  # the default method
    policy: Policy
    tiers: Mapping[str, tuple[Tier, ...]]  # rope_type -> ascending tiers that a request may name
    native_len: int  # L
    original_len: int  # factors are multiples of it: L, or less if scaling is trained in
    max_rope_factor: float
    max_len: int  # positions of the longest request on any tier; advertised as max_model_len
    overridable: bool  # whether requests may choose a policy
    is_cache_limited: bool = False  # whether max_len is what the KV cache holds
    # Position method -> ascending tiers that a request may name.
    positions: Mapping[str, tuple[Tier, ...]] = field(default_factory=dict)
    note: str | None = None  # what an operator should know about it
    # rope_type -> further tiers, which only a request that names a factor exactly may have.
    exact: Mapping[str, tuple[Tier, ...]] = field(default_factory=dict)

    @property
    def own_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of a request without `rope`: under `fixed`, only the longest."""
        tiers = self.tiers[self.rope_type]
        return tiers[-1:] if self.policy == "fixed" else tiers

    @property
    def serves_default_within_native(self) -> bool:
        """Return whether requests may name `default`, but within L only.

        A deployment whose first tier is the native table reports `default` in short answers. A
        client may send that back, even if `allowed_rope_types` lacks it.
        """
        first = self.tiers[self.rope_type][0]
        return "default" not in self.tiers and first.profile.scaling.rope_type == "default"

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
        *others, last = self.tiers[self.rope_type]
        method = last.profile.positions
        if method is None or method.kept is None:
            return None
        num_first, num_last = method.kept
        return num_first + max([num_last, *(tier.ceiling for tier in others)])

    def place(self, asked: RopeRequest, num_prompt_tokens: int, max_tokens: int) -> Placement:
        """Return the tier a request starts on, and the tiers it may grow to.

        Raises RequestError if the `rope` object is not allowed, ContextLengthError if the request
        does not fit.
        """
        return self._place(self._asked(asked), num_prompt_tokens, max_tokens, is_open=False)

    def place_open(
        self, asked: RopeRequest, num_prompt_tokens: int, most: int | None = None
    ) -> tuple[int, Placement]:
        """Return max_tokens and the placement of a request that leaves max_tokens out.

        Its answer may run to the longest context, or have `most` tokens. Raises what `place` does;
        errors name no max_tokens.
        """
        way = self._asked(asked)
        # The last token is never read back, so it needs no position.
        max_tokens = max(1, self._end(way) - num_prompt_tokens + 1)
        if most is not None:
            max_tokens = min(max_tokens, most)
        return max_tokens, self._place(way, num_prompt_tokens, max_tokens, is_open=True)

    def longest_prompt(self, asked: RopeRequest, max_tokens: int | None) -> int:
        """Return the tokens of the longest prompt that leaves room for an answer.

        `max_tokens`: of the answer; None: an eighth of L. Raises RequestError as `place` does.
        """
        wanted = self.native_len // 8 if max_tokens is None else max_tokens
        return self._end(self._asked(asked)) - max(0, wanted - 1)

    def _end(self, way: _Way) -> int:
        """Return the positions of the longest request of a way."""
        return min(longest(way.tiers), self.max_len)

    def _place(
        self, way: _Way, num_prompt_tokens: int, max_tokens: int, *, is_open: bool
    ) -> Placement:
        asked, policy, tiers, at_least = way
        num_covered = num_prompt_tokens + max(0, max_tokens - 1)
        if num_covered > self.max_len:
            raise too_long(self, tiers, asked, num_prompt_tokens, max_tokens, is_open=is_open)
        tier = choose_tier(tiers, num_prompt_tokens, num_covered, at_least)
        if tier is None:
            if self.is_native_only(asked):
                raise beyond_native(self, num_covered)
            raise too_long(self, tiers, asked, num_prompt_tokens, max_tokens, is_open=is_open)
        if asked.factor is not None and not self._may_have(asked.factor, tier, policy):
            raise refused_factor(self, asked, asked.factor, self._tiers(asked))
        higher = tuple(each for each in tiers if each.ceiling > tier.ceiling)
        lower = tuple(
            each
            for each in tiers
            if policy == "by_position" and each.ceiling < tier.ceiling and each.factor >= at_least
        )
        return Placement(
            self.name, tier, higher, policy, asked.factor, self.original_len, asked.is_exact, lower
        )

    def _asked(self, asked: RopeRequest) -> _Way:
        """Return the policy, the tiers and the least factor of a request. Raises RequestError."""
        if asked.original_len not in (None, self.original_len):
            raise RequestError(
                "`rope.original_max_position_embeddings` is only reported, and must be "
                f"{self.original_len}. Given: {asked.original_len}",
                param="rope.original_max_position_embeddings",
            )
        policy, tiers = self._policy(asked), self._tiers(asked)
        if asked.is_exact:
            tiers = (self._exact_tier(asked, tiers),)
        at_least = self._factor(asked, tiers)
        if policy == "fixed":
            tiers = self._one_tier(tiers, at_least, asked)
        return _Way(asked, policy, tiers, at_least)

    def _policy(self, asked: RopeRequest) -> Policy:
        if asked.policy is None:
            return self.policy
        accepted = POLICIES if self.overridable else (self.policy,)
        name = OTHER_POLICY_NAMES.get(asked.policy, asked.policy)
        for policy in accepted:
            if name == policy:
                return policy
        raise RequestError(
            f"`rope.policy` must be {_one_of(accepted)}. Given: {asked.policy}",
            param="rope.policy",
        )

    def type_of(self, asked: RopeRequest) -> str:
        return asked.rope_type or self.rope_type

    def _tiers(self, asked: RopeRequest) -> tuple[Tier, ...]:
        if asked.positions is not None:
            own = self.tiers[self.rope_type][-1].profile.positions
            if asked.rope_type not in (None, "default") and own is None:
                raise RequestError(
                    "`rope.positions` go with `rope_type` default, the trained table. Given: "
                    f"{asked.rope_type}",
                    param="rope.positions",
                )
            return asked_position_tiers(asked.positions, self.positions)
        rope_type = self.type_of(asked)
        tiers = self.tiers.get(rope_type)
        if self.is_native_only(asked):
            return self.tiers[self.rope_type][:1]
        if tiers is None:
            raise RequestError(
                f"`rope.rope_type` must be {_one_of(sorted(self.tiers))}. Given: {rope_type}",
                param="rope.rope_type",
            )
        return tiers

    def is_native_only(self, asked: RopeRequest) -> bool:
        """Return whether a request names `default` where it is served within L only."""
        is_default = asked.rope_type == "default" and asked.positions is None
        return is_default and self.serves_default_within_native

    def _exact_tier(self, asked: RopeRequest, tiers: Sequence[Tier]) -> Tier:
        """Return the tier of exactly the factor of a request. Raises RequestError."""
        factor = asked.factor or 1.0
        if factor > self.max_rope_factor:
            raise refused_factor(self, asked, factor, tiers)
        further = self.exact.get(self.type_of(asked), ()) if asked.positions is None else ()
        found = {tier.factor: tier for tier in (*further, *tiers)}
        if factor not in found:
            factors = sorted(each for each in found if each <= self.max_rope_factor)
            raise RequestError(
                f"`rope.factor` must be {_one_of([f'{each:g}' for each in factors])} with `exact` "
                f"(rope_tiers, exact_rope_factors). Given: {factor:g}",
                param="rope.factor",
            )
        return found[factor]

    def _factor(self, asked: RopeRequest, tiers: Sequence[Tier]) -> float:
        """Return the least factor that a request may choose. Raises RequestError."""
        if asked.factor is None:
            return 1.0
        if not 1.0 <= asked.factor <= tiers[-1].factor:
            raise refused_factor(self, asked, asked.factor, tiers)
        # Above the operator's limit it chooses nothing, and `place` compares it with the tier.
        return asked.factor if asked.factor <= self.max_rope_factor else 1.0

    def _may_have(self, factor: float, tier: Tier, policy: Policy) -> bool:
        """Return whether a request with a factor may have its tier.

        A factor above max_rope_factor may name the tier that the request has without it, because
        answers report that factor and clients send it back.
        """
        if factor <= self.max_rope_factor:
            return True
        return factor == tier.factor if policy == "fixed" else factor <= tier.factor

    def _one_tier(
        self, tiers: tuple[Tier, ...], at_least: float, asked: RopeRequest
    ) -> tuple[Tier, ...]:
        if asked.factor is None or asked.factor > self.max_rope_factor:
            return tiers[-1:]
        return tuple(tier for tier in tiers if tier.factor >= at_least)[:1]


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
