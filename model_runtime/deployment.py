"""A served model name: its tiers and policy, and where each request is placed.

Several deployments share one set of weights and one cache. All tables a deployment can ever use
are fixed when it is made, so tables and cache keys stay few whatever clients send.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_runtime.errors import ContextLengthError, RequestError
from rope import POLICIES, Policy, Tier, choose_tier, longest


@dataclass(frozen=True, slots=True)
class RopeRequest:
    """The `rope` object of a request; None: the deployment's own."""

    rope_type: str | None = None
    factor: float | None = None  # at least this; raised to the next tier
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What was decided for one request, and what it is told."""

    deployment: str
    tier: Tier  # the one it starts on
    higher_tiers: tuple[Tier, ...]  # those a growing request may move to, ascending
    policy: Policy
    requested_factor: float | None
    original_len: int  # the length that factors are multiples of

    def tier_covering(self, num_tokens: int) -> Tier:
        """The tier of a growing request that has so many tokens; the first if that suffices."""
        for tier in (self.tier, *self.higher_tiers):
            if tier.ceiling >= num_tokens:
                return tier
        raise AssertionError("admission lets nothing in that the last tier does not cover")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One served name. Made by `make_deployment` (its own file)."""

    name: str
    rope_type: str  # the method served when a request names none
    policy: Policy
    tiers: Mapping[str, tuple[Tier, ...]]  # rope_type -> ascending tiers; what may be asked for
    native_len: int  # L
    original_len: int  # what factors are multiples of: L, or less where scaling is trained in
    max_rope_factor: float
    max_len: int  # positions of the longest request, whatever its tier
    overridable: bool  # whether requests may choose a policy
    answer_reserve: int  # tokens kept free for an answer whose request names no max_tokens

    @property
    def own_tiers(self) -> tuple[Tier, ...]:
        """The tiers in use when a request says nothing: under `fixed`, only the longest."""
        tiers = self.tiers[self.rope_type]
        return tiers[-1:] if self.policy == "fixed" else tiers

    def place(self, asked: RopeRequest, num_prompt_tokens: int, max_tokens: int) -> Placement:
        """The tier a request starts on, and those it may grow to.

        Raises RequestError for what may not be asked, ContextLengthError for what does not fit.
        """
        policy = self._policy(asked)
        tiers = self._tiers(asked)
        at_least = self._factor(asked, tiers)
        if policy == "fixed":
            tiers = self._one_tier(tiers, at_least, asked)
        num_covered = num_prompt_tokens + max(0, max_tokens - 1)
        if num_covered > self.max_len:
            raise self._too_long(tiers, asked, num_prompt_tokens, max_tokens)
        tier = choose_tier(tiers, policy, num_covered, num_prompt_tokens, at_least)
        if tier is None:
            raise self._too_long(tiers, asked, num_prompt_tokens, max_tokens)
        higher = tuple(each for each in tiers if each.ceiling > tier.ceiling)
        return Placement(self.name, tier, higher, policy, asked.factor, self.original_len)

    def open_max_tokens(
        self, asked: RopeRequest, num_prompt_tokens: int, num_positions: int
    ) -> int:
        """The max_tokens of a request that names none: its answer may run to the end of its tier.

        That is the smallest tier that covers prompt and reserve; for a growing request the last
        one. `num_positions`: what the server holds for one sequence, whatever the tier.
        Raises RequestError as `place` does; leaves what does not fit for `place` to refuse.
        """
        policy, tiers = self._policy(asked), self._tiers(asked)
        at_least = self._factor(asked, tiers)
        if policy == "fixed":
            tiers = self._one_tier(tiers, at_least, asked)
        most = min(longest(tiers), self.max_len, num_positions)
        wanted = min(num_prompt_tokens + self.answer_reserve, most)
        end = most
        if policy == "pinned":
            tier = choose_tier(tiers, policy, wanted, num_prompt_tokens, at_least)
            end = most if tier is None else min(tier.ceiling, most)
        # The last token is never read back, so it needs no position.
        return max(1, end - num_prompt_tokens + 1)

    def _policy(self, asked: RopeRequest) -> Policy:
        if asked.policy is None:
            return self.policy
        accepted = POLICIES if self.overridable else (self.policy,)
        for policy in accepted:
            if asked.policy == policy:
                return policy
        raise RequestError(
            f"`rope.policy` must be one of {', '.join(accepted)}. Given: {asked.policy}",
            param="rope.policy",
        )

    def _tiers(self, asked: RopeRequest) -> tuple[Tier, ...]:
        rope_type = asked.rope_type or self.rope_type
        tiers = self.tiers.get(rope_type)
        if tiers is None:
            raise RequestError(
                f"`rope.rope_type` must be one of {', '.join(sorted(self.tiers))}. "
                f"Given: {rope_type}",
                param="rope.rope_type",
            )
        return tiers

    def _factor(self, asked: RopeRequest, tiers: Sequence[Tier]) -> float:
        if asked.factor is None:
            return 1.0
        highest = min(self.max_rope_factor, tiers[-1].factor)
        if not 1.0 <= asked.factor <= highest:
            raise RequestError(
                f"`rope.factor` must be between 1 and {highest:g}. Given: {asked.factor:g}",
                param="rope.factor",
            )
        return asked.factor

    @staticmethod
    def _one_tier(tiers: tuple[Tier, ...], at_least: float, asked: RopeRequest) -> tuple[Tier, ...]:
        if asked.factor is None:
            return tiers[-1:]
        return tuple(tier for tier in tiers if tier.factor >= at_least)[:1]

    def _too_long(
        self, tiers: Sequence[Tier], asked: RopeRequest, num_prompt_tokens: int, max_tokens: int
    ) -> ContextLengthError:
        """The numbers, which limit it was, and the factor that would fit."""
        num_covered = num_prompt_tokens + max(0, max_tokens - 1)
        limit = min(longest(tiers), self.max_len)
        fits = math.ceil(num_covered / self.original_len)
        own = self.tiers[self.rope_type]
        if longest(tiers) < longest(own):
            reason, who = f"the requested factor {tiers[-1].factor:g}", "asked for"
        elif self.max_len < longest(own):
            reason, who = "max_model_len", "configured with a larger max_model_len"
        else:
            reason, who = f"the longest tier, {own[-1].factor:g} times", "configured"
        message = (
            f"This model's maximum context length is {limit} tokens ({reason}). However, your "
            f"request has {num_prompt_tokens} prompt tokens and max_tokens {max_tokens}, which is "
            f"{num_covered} positions. A rope factor of {fits} ({fits * self.original_len} tokens) "
            f"would fit, if it were {who}."
        )
        if num_prompt_tokens <= limit:
            message += f" max_tokens may be at most {limit - num_prompt_tokens + 1}."
        details = {
            "n_prompt_tokens": num_prompt_tokens,
            "max_tokens": max_tokens,
            "n_ctx": limit,
            "rope": {
                "rope_type": asked.rope_type or self.rope_type,
                "factor": own[-1].factor if asked.factor is None else tiers[-1].factor,
                "factor_that_fits": float(fits),
            },
        }
        return ContextLengthError(
            message, param="prompt", code="context_length_exceeded", details=details
        )
