"""A served model name, with its tiers, its policy and the placement of each request.

Several deployments share one set of weights and one cache. All tables of a deployment are fixed
when it is created, so clients cannot increase the number of tables and cache keys.
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
    """The tier and policy of one request, as reported to the client."""

    deployment: str
    tier: Tier  # the one it starts on
    higher_tiers: tuple[Tier, ...]  # those a growing request may move to, ascending
    policy: Policy
    requested_factor: float | None
    original_len: int  # the length that factors are multiples of

    def tier_covering(self, num_tokens: int) -> Tier:
        """Return the lowest tier of a growing request that covers its tokens."""
        for tier in (self.tier, *self.higher_tiers):
            if tier.ceiling >= num_tokens:
                return tier
        raise AssertionError("admission lets nothing in that the last tier does not cover")


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
    max_len: int  # positions of the longest request on any tier
    overridable: bool  # whether requests may choose a policy
    answer_reserve: int  # tokens reserved for an answer without max_tokens

    @property
    def own_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of a request without `rope`: under `fixed`, only the longest."""
        tiers = self.tiers[self.rope_type]
        return tiers[-1:] if self.policy == "fixed" else tiers

    def place(self, asked: RopeRequest, num_prompt_tokens: int, max_tokens: int) -> Placement:
        """Return the tier a request starts on, and the tiers it may grow to.

        Raises RequestError if the `rope` object is not allowed, ContextLengthError if the request
        does not fit.
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
        """Return the default max_tokens of a request: its answer may run to the end of its tier.

        That is the smallest tier that covers prompt and reserve. For a growing request it is the
        last one. `num_positions`: the server's limit for one sequence on any tier.
        Raises RequestError as `place` does, but leaves ContextLengthError to `place`.
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
        """Build the error with the numbers, the limit, and the factor that would fit."""
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
