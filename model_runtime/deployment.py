"""A served model name: its method, tiers and policy, and where each request is placed.

Several deployments share one set of weights and one cache. All tables a deployment can ever use
are fixed when it is made, so tables and cache keys stay few whatever clients send.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from model_runtime.errors import ContextLengthError, RequestError
from rope import (
    ROPE_TYPES,
    LongRope,
    Method,
    NativeRope,
    Profile,
    RopeConfigError,
    Tier,
    build_tiers,
    choose_tier,
    longest,
    native_tier,
    parse_method,
)

ServedPolicy = Literal["fixed", "pinned"]  # of rope.POLICIES, those the engine can run
SERVED_POLICIES: tuple[ServedPolicy, ...] = get_args(ServedPolicy)
# What a checkpoint without scaling gets: harmless up to L, alive above it.
DEFAULT_ROPE_SCALING: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0}


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
    tier: Tier
    policy: ServedPolicy
    requested_factor: float | None
    native_len: int  # L

    @property
    def profile(self) -> Profile:
        """The table it is served under."""
        return self.tier.profile

    @property
    def rope_type(self) -> str:
        """The method that was applied; `default` wherever that is the untouched table."""
        return self.profile.scaling.rope_type


@dataclass(frozen=True, slots=True)
class Deployment:
    """One served name. Made by `make_deployment`."""

    name: str
    rope_type: str  # the method served when a request names none
    policy: ServedPolicy
    tiers: Mapping[str, tuple[Tier, ...]]  # rope_type -> ascending tiers; what may be asked for
    native_len: int  # L
    max_rope_factor: float
    max_len: int  # positions of the longest request, whatever its tier
    overridable: bool  # whether requests may choose a policy

    @property
    def own_tiers(self) -> tuple[Tier, ...]:
        """The tiers in use when a request says nothing: under `fixed`, only the longest."""
        tiers = self.tiers[self.rope_type]
        return tiers[-1:] if self.policy == "fixed" else tiers

    def place(self, asked: RopeRequest, num_prompt_tokens: int, max_tokens: int) -> Placement:
        """The tier that serves a request for its whole life.

        Raises RequestError for what may not be asked, ContextLengthError for what does not fit.
        """
        policy = self._policy(asked)
        tiers = self._tiers(asked)
        at_least = self._factor(asked, tiers)
        if policy == "fixed":
            tiers = self._one_tier(tiers, at_least, asked)
        num_covered = num_prompt_tokens + max(0, max_tokens - 1)
        if num_covered > self.max_len:
            raise self._too_long(tiers, num_prompt_tokens, max_tokens)
        tier = choose_tier(tiers, policy, num_covered, num_prompt_tokens, at_least)
        if tier is None:
            raise self._too_long(tiers, num_prompt_tokens, max_tokens)
        return Placement(self.name, tier, policy, asked.factor, self.native_len)

    def _policy(self, asked: RopeRequest) -> ServedPolicy:
        if asked.policy is None or asked.policy == self.policy:
            return self.policy
        for policy in SERVED_POLICIES:
            if asked.policy == policy and self.overridable:
                return policy
        accepted = SERVED_POLICIES if self.overridable else (self.policy,)
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
        self, tiers: Sequence[Tier], num_prompt_tokens: int, max_tokens: int
    ) -> ContextLengthError:
        longest_len = min(longest(tiers), self.max_len)
        fits = math.ceil((num_prompt_tokens + max(0, max_tokens - 1)) / self.native_len)
        message = (
            f"This model's maximum context length is {longest_len} tokens. However, your request "
            f"has {num_prompt_tokens} prompt tokens and max_tokens {max_tokens}. A rope factor of "
            f"{fits} ({fits * self.native_len} tokens) would fit; the longest tier in use is "
            f"{tiers[-1].factor:g} times the trained {self.native_len} tokens."
        )
        details = {
            "n_prompt_tokens": num_prompt_tokens,
            "max_tokens": max_tokens,
            "n_ctx": longest_len,
            "rope": {
                "rope_type": tiers[-1].profile.scaling.rope_type,
                "factor": tiers[-1].factor,
                "factor_that_fits": float(fits),
            },
        }
        return ContextLengthError(
            message, param="prompt", code="context_length_exceeded", details=details
        )


def make_deployment(
    name: str,
    native: NativeRope,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    policy: ServedPolicy | None = None,
    multiples: Sequence[float] | None = None,
    allowed_rope_types: Sequence[str] | None = None,
    max_rope_factor: float | None = None,
    max_model_len: int | None = None,
) -> Deployment:
    """Decide how a name is served (design, section 2). Raises RopeConfigError.

    A checkpoint that carries scaling is served natively; on top of it only a `fixed` override is
    accepted, which replaces its block as transformers would.
    """
    if rope_scaling is None and not native.carries_scaling:
        factor = max(multiples) if multiples else DEFAULT_ROPE_SCALING["factor"]
        rope_scaling = {**DEFAULT_ROPE_SCALING, "factor": factor}
    if rope_scaling is None:
        return _native_deployment(
            name,
            native,
            policy=policy,
            multiples=multiples,
            max_rope_factor=max_rope_factor,
            max_model_len=max_model_len,
        )
    method = _method(rope_scaling, native, multiples)
    policy = policy or "pinned"
    if native.carries_scaling and policy != "fixed":
        raise RopeConfigError(
            "rope_policy",
            f"must be fixed: the checkpoint was trained with {native.method.scaling.rope_type}, "
            f"and rescaling that by length is not supported yet; got {policy}",
        )
    if policy == "fixed" and multiples is not None:
        raise RopeConfigError("rope_tiers", "has no meaning under rope_policy fixed, remove it")
    own = build_tiers(method, native, multiples)
    if native.carries_scaling:
        tiers = {method.scaling.rope_type: own}
    else:
        tiers = _allowed_tiers(method, native, own, allowed_rope_types)
    return Deployment(
        name,
        method.scaling.rope_type,
        policy,
        tiers,
        method.native_len,
        _max_factor(max_rope_factor, own),
        _max_len(max_model_len, own),
        overridable=not native.carries_scaling,
    )


def _native_deployment(
    name: str,
    native: NativeRope,
    *,
    policy: ServedPolicy | None,
    multiples: Sequence[float] | None,
    max_rope_factor: float | None,
    max_model_len: int | None,
) -> Deployment:
    method = native.method
    rope_type = method.scaling.rope_type
    by_length = rope_type in ("longrope", "dynamic")
    if policy == "pinned" and not by_length:
        raise RopeConfigError(
            "rope_policy",
            f"must be fixed: the checkpoint was trained with {rope_type}, and rescaling that by "
            "length is not supported yet; got pinned",
        )
    if multiples is not None and not by_length:
        raise RopeConfigError("rope_tiers", f"has no meaning for a checkpoint with {rope_type}")
    if by_length:
        tiers = build_tiers(method, native, multiples)
    else:
        tiers = (native_tier(native, native.native_len),)
    return Deployment(
        name,
        rope_type,
        policy or ("pinned" if by_length else "fixed"),
        {rope_type: tiers},
        method.native_len if by_length else native.native_len,
        _max_factor(max_rope_factor, tiers),
        _max_len(max_model_len, tiers),
        overridable=False,
    )


def _method(
    block: Mapping[str, Any], native: NativeRope, multiples: Sequence[float] | None
) -> Method:
    """The block's method; a list of tiers stands in for an absent factor."""
    if multiples and block.get("factor") is None and block.get("rope_type") != "default":
        block = {**block, "factor": max(multiples)}
    return parse_method(block, native.rotary, native.native_len)


def _allowed_tiers(
    method: Method,
    native: NativeRope,
    own: tuple[Tier, ...],
    allowed_rope_types: Sequence[str] | None,
) -> dict[str, tuple[Tier, ...]]:
    """The tiers of every method that requests may name; same ceilings, the method's defaults."""
    own_type = method.scaling.rope_type
    has_lists = isinstance(method.scaling, LongRope)
    possible = [name for name in ROPE_TYPES if name != "longrope" or has_lists]
    if allowed_rope_types is None:
        allowed_rope_types = possible
    tiers = {own_type: own}
    for name in allowed_rope_types:
        if name not in possible:
            raise RopeConfigError(
                "allowed_rope_types", f"accepts {', '.join(possible)} here; got {name!r}"
            )
        if name == own_type:
            continue
        if name == "default":
            tiers[name] = (native_tier(native, longest(own)),)
            continue
        # `dynamic` has a factor of its own beside the tier's; 1 is the paper's plain form.
        block = {
            "rope_type": name,
            "factor": 1.0 if name == "dynamic" else own[-1].factor,
            "original_max_position_embeddings": method.native_len,
        }
        other = parse_method(block, native.rotary, native.native_len)
        tiers[name] = build_tiers(other, native, [tier.factor for tier in own])
    return tiers


def _max_factor(max_rope_factor: float | None, tiers: Sequence[Tier]) -> float:
    if max_rope_factor is not None and max_rope_factor < 1:
        raise RopeConfigError("max_rope_factor", f"must be >= 1, got {max_rope_factor:g}")
    return tiers[-1].factor if max_rope_factor is None else max_rope_factor


def _max_len(max_model_len: int | None, tiers: Sequence[Tier]) -> int:
    if max_model_len is not None and max_model_len > longest(tiers):
        raise RopeConfigError(
            "max_model_len",
            f"must be <= the longest tier ({longest(tiers)} tokens), got {max_model_len}; a larger "
            "rope_scaling factor makes longer tiers",
        )
    return max_model_len or longest(tiers)
