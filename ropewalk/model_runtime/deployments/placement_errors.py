"""Errors of requests that no tier of a deployment may serve: numbers, limit, and what would fit."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropewalk.model_runtime.errors import ContextLengthError, RequestError
from ropewalk.rope import Tier, longest

if TYPE_CHECKING:
    from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest


def refused_factor(
    deployment: "Deployment", asked: "RopeRequest", factor: float, tiers: Sequence[Tier]
) -> RequestError:
    """Build the error of a factor that the request may not have."""
    highest = min(deployment.max_rope_factor, tiers[-1].factor)
    accepted = f"between 1 and {highest:g}"
    if tiers[-1].factor == 1:
        accepted = f"1 under `rope_type` {deployment.type_of(asked)}"
    elif highest == 1:
        accepted = "1 (max_rope_factor)"
    return RequestError(f"`rope.factor` must be {accepted}. Given: {factor:g}", param="rope.factor")


def beyond_native(deployment: "Deployment", num_covered: int) -> RequestError:
    """Build the error of a request that names `default` and is longer than L."""
    native = deployment.tiers[deployment.rope_type][0].ceiling
    return RequestError(
        f"`rope.rope_type` default is served within the native length ({native} tokens) only, "
        "because the operator does not allow it beyond (allowed_rope_types). Your request is "
        f"{num_covered} positions. Beyond, the field must be one of "
        f"{', '.join(sorted(deployment.tiers))}.",
        param="rope.rope_type",
    )


def too_long(
    deployment: "Deployment",
    tiers: Sequence[Tier],
    asked: "RopeRequest",
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    is_open: bool,
) -> ContextLengthError:
    """Build the error with the numbers, the limit that was hit, and what would fit."""
    own = deployment.tiers[deployment.rope_type]
    if deployment.is_native_only(asked):
        tiers = own  # the request is too long for these, too
    num_covered = num_prompt_tokens + max(0, max_tokens - 1)
    limit = min(longest(tiers), deployment.max_len)
    fits = float(math.ceil(num_covered / deployment.original_len))
    if num_covered <= longest(own):
        fits = min(fits, own[-1].factor)  # the longest tier may end at a fraction of L
    given = f"{num_prompt_tokens} prompt tokens"
    if not is_open:
        total = num_prompt_tokens + max_tokens
        given = (
            f"{total} tokens ({num_prompt_tokens} in the prompt and max_tokens {max_tokens}), of "
            f"which all but the last take a position, {num_covered} in all"
        )
    message = (
        f"This model's maximum context length is {limit} tokens ({_limit(deployment, tiers)}). "
        f"However, your request has {given}. {_remedy(deployment, num_covered, fits)}"
    )
    is_prompt_too_long = num_prompt_tokens > limit
    if not is_prompt_too_long:
        message += f" max_tokens may be at most {limit - num_prompt_tokens + 1}."
    details = {
        "n_prompt_tokens": num_prompt_tokens,
        "max_tokens": None if is_open else max_tokens,
        "n_ctx": limit,
        "rope": {
            "rope_type": deployment.type_of(asked),
            "factor": own[-1].factor if asked.factor is None else tiers[-1].factor,
            "factor_that_fits": fits,
        },
    }
    return ContextLengthError(
        message,
        param="prompt" if is_prompt_too_long else "max_tokens",
        code="context_length_exceeded",
        details=details,
    )


def _limit(deployment: "Deployment", tiers: Sequence[Tier]) -> str:
    """Return the limit on a request that may have some tiers, in words."""
    own = deployment.tiers[deployment.rope_type]
    factor, method = own[-1].factor, tiers[-1].profile.positions
    if longest(tiers) < deployment.max_len:
        if method is not None:
            return f"the reach of {method.method}"
        return f"the requested factor {tiers[-1].factor:g}"
    if deployment.is_cache_limited:
        return "what the KV cache holds"
    if deployment.max_len < longest(own) or method is not None:
        return "max_model_len"
    return "the trained length" if factor == 1 else f"the longest tier, of factor {factor:g}"


def _remedy(deployment: "Deployment", num_covered: int, fits: float) -> str:
    """Return the sentence about the change with which a request would fit."""
    if deployment.tiers[deployment.rope_type][-1].profile.positions is not None:
        return "A larger max_model_len would fit it, as far as the position method reaches."
    covered = round(fits * deployment.original_len)
    factor = f"A rope factor of {fits:g} ({covered} tokens) would fit"
    if num_covered <= deployment.max_len:
        allowed = fits <= deployment.max_rope_factor
        return f"{factor}, if it were {'asked for' if allowed else 'allowed (max_rope_factor)'}."
    own_len = longest(deployment.tiers[deployment.rope_type])
    size = " with a larger KV cache" if deployment.is_cache_limited else ""
    if not size and deployment.max_len < own_len:
        size = " with a larger max_model_len"
    if num_covered <= own_len:
        return f"It would fit, if the server were configured{size}."
    return f"{factor}, if the server were configured for it{size and ' and'}{size}."
