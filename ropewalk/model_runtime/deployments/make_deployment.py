"""Build a Deployment from settings and a checkpoint's rope block."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, field_validator

from ropewalk.model_runtime.deployments.allowed_tiers import tiers_by_type
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.deployments.position_tiers import (
    own_position_tiers,
    tiers_by_positions,
)
from ropewalk.model_runtime.setting import setting
from ropewalk.rope import (
    OTHER_POLICY_NAMES,
    POLICIES,
    POSITION_METHODS,
    ROPE_TYPES,
    SWITCHING,
    NativeRope,
    Policy,
    RopeConfigError,
    Tier,
    longest,
    rope_type_of,
)
from ropewalk.rope.from_config import Method, parse_method
from ropewalk.rope.tiers import build_tiers, fixed_tier, native_tier

# For a checkpoint without scaling: no change up to L, and scaling above it.
DEFAULT_ROPE_SCALING: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0}
# benchmarks/results/quality.md has the measurements behind it.
DEFAULT_POLICY: Policy = "by_position"
# Checkpoints that switch by length themselves were trained with one table for a whole prompt.
_SWITCHING_POLICY: Policy = "grow"


class DeploymentOptions(BaseModel):
    """An operator's choices for one deployment, which are the settings under Deployment.

    A field that is None leaves its choice to the checkpoint or to the scaling method.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rope_scaling: dict[str, Any] | None = setting(
        None,
        "Rope block in Hugging Face's format: how to rescale beyond the trained length. "
        'Default: {"rope_type": "yarn", "factor": 4.0}, or the checkpoint\'s own block.',
        unit="JSON",
    )
    rope_policy: Policy | None = setting(
        None,
        f"Policy that chooses a request's tier: {', '.join(POLICIES)}. Default: by_position, or "
        "that of the checkpoint's own scaling.",
        unit="name",
    )
    rope_tiers: tuple[float, ...] | None = setting(
        None,
        "Tier ceilings as multiples of the trained length, rising from 1 to the factor, for "
        "example 1,2,4,8. Default: powers of two up to the factor.",
        unit="multiples",
    )
    allowed_rope_types: tuple[str, ...] | None = setting(
        None,
        f"Methods that a request may name: {', '.join(ROPE_TYPES)}. The deployment's own method "
        "must be one of them. Default: all that the model supports.",
        unit="names",
    )
    allowed_positions: tuple[str, ...] | None = setting(
        None,
        f"Position methods that a request may name: {', '.join(POSITION_METHODS)}. The "
        "deployment's own method must be one of them. Default: the deployment's own, and native.",
        unit="names",
    )
    max_rope_factor: float | None = setting(
        None,
        "Largest factor that a request may name, at most that of the longest tier. Default: the "
        "factor of the longest tier.",
        unit="factor",
        ge=1,
    )
    exact_rope_factors: tuple[float, ...] | None = setting(
        None,
        "Factors that a request may name exactly, beside those of the tiers, for example 1.3,3.",
        unit="factors",
    )
    max_model_len: int | None = setting(
        None,
        "Longest context length. Default: the longest tier, or the cache's size if that is "
        "smaller. The server refuses to start if this is larger than the cache.",
        unit="tokens",
        flags=("--context-length", "--ctx-size", "-c"),
        ge=1,
    )

    @field_validator("rope_policy", mode="before")
    @classmethod
    def _newer_name(cls, value: Any) -> Any:
        return OTHER_POLICY_NAMES.get(value, value) if isinstance(value, str) else value


_DEFAULTS = DeploymentOptions()


class _Own(NamedTuple):
    """The method, the policy and the tiers of a request that names none.

    A tier with positions has their method in its profile.
    """

    method: Method
    policy: Policy
    tiers: tuple[Tier, ...]  # ascending


def make_deployment(
    name: str, native: NativeRope, options: DeploymentOptions = _DEFAULTS, page_size: int = 1
) -> Deployment:
    """Build the deployment of a name. Raises RopeConfigError.

    `page_size`: of the cache, which windows and chunks of position methods follow.

    A block that was added to a checkpoint (`NativeRope.added_block`) scales by length. A checkpoint
    that was trained with its block is served under it, or by length if `rope_policy` says so.
    """
    note = None
    if _scales_by_length(native, options):
        note = _note(native, options)
        native = native.without_scaling()
    block = _rope_scaling(native, options)
    method, policy, own = _own(native, block, options, page_size)
    rope_type = method.scaling.rope_type
    max_len = _max_len(options.max_model_len, own, trained=rope_type if block is None else None)
    by_type = tiers_by_type(
        own,
        method,
        native,
        block,
        allowed=options.allowed_rope_types,
        exact_factors=options.exact_rope_factors,
    )
    by_positions = tiers_by_positions(
        own, native, max_len, page_size, allowed=options.allowed_positions
    )
    return Deployment(
        name,
        rope_type,
        policy,
        by_type | by_positions,
        native.native_len if method is native.method else method.native_len,
        method.native_len,
        _max_factor(options.max_rope_factor, own),
        max_len,
        overridable=not native.carries_scaling,
        note=note,
    )


def _scales_by_length(native: NativeRope, options: DeploymentOptions) -> bool:
    """Return whether a deployment takes a checkpoint's block as a way to go beyond L."""
    if native.block is None or native.method.scaling.rope_type in SWITCHING:
        return False
    return native.added_block is not None or options.rope_policy not in (None, "fixed")


def _note(native: NativeRope, options: DeploymentOptions) -> str:
    """Return what an operator should know about a block that scales by length."""
    rope_type, length = native.method.scaling.rope_type, native.method.native_len
    if native.added_block is not None:
        return (
            f"{rope_type} was added to the checkpoint, because {native.added_block}; so the "
            f"trained length is {length} tokens"
        )
    return (
        f"the checkpoint was trained with {rope_type}; under rope_policy {options.rope_policy} its "
        f"first {length} tokens are served without it, which the model may not know"
    )


def _rope_scaling(native: NativeRope, options: DeploymentOptions) -> Mapping[str, Any] | None:
    """Return the block to apply; None: the checkpoint's own scaling is served."""
    if options.rope_scaling is not None or native.carries_scaling:
        return options.rope_scaling
    if native.chunked is not None:
        return native.chunked.rope_block()
    block = native.block or DEFAULT_ROPE_SCALING
    return {**block, "factor": None} if options.rope_tiers else block  # `rope_tiers` sets it


def _own(
    native: NativeRope, block: Mapping[str, Any] | None, options: DeploymentOptions, page_size: int
) -> _Own:
    """Return the choice for a block; None: the checkpoint's own scaling is served."""
    if block is None:
        return _own_natively(native, options)
    longest_len, is_trained = options.max_model_len, options.rope_scaling is None
    if is_trained and native.chunked is not None:
        longest_len = longest_len or native.chunked.longest
    tiers = own_position_tiers(block, native, longest_len, page_size)
    block = {field: value for field, value in block.items() if field != "positions"}
    if tiers is None:
        return _own_by_block(native, block, options)
    if options.rope_tiers is not None:
        positions = tiers[-1].profile.positions
        assert positions is not None
        raise RopeConfigError("rope_tiers", f"has no meaning beside positions ({positions.method})")
    method = native.method
    if not native.carries_scaling:
        method = parse_method(block, native.rotary, native.native_len)
        if method.native_len != native.native_len:
            raise RopeConfigError(
                "original_max_position_embeddings",
                f"must be {native.native_len} beside positions; got {method.native_len}",
            )
    policy = options.rope_policy or (_SWITCHING_POLICY if is_trained else DEFAULT_POLICY)
    return _Own(method, policy, tiers)


def _own_by_block(native: NativeRope, block: Mapping[str, Any], options: DeploymentOptions) -> _Own:
    """Return the choice for a block without positions."""
    multiples = options.rope_tiers
    _check_override(block, native)
    method = _method(block, native, multiples)
    policy = options.rope_policy or ("fixed" if native.carries_scaling else DEFAULT_POLICY)
    if native.carries_scaling and policy != "fixed":
        raise RopeConfigError(
            "rope_policy",
            f"must be fixed beside rope_scaling, because {native.method.scaling.rope_type} "
            f"checkpoints switch by length themselves: leave rope_scaling out; got {policy}",
        )
    if policy == "fixed" and multiples is not None:
        raise RopeConfigError("rope_tiers", "has no meaning under rope_policy fixed, remove it")
    if native.carries_scaling:
        return _Own(method, policy, (fixed_tier(method),))
    _refuse_two_lengths(method, multiples)
    return _Own(method, policy, build_tiers(method, native, multiples))


def _own_natively(native: NativeRope, options: DeploymentOptions) -> _Own:
    """Return the choice for a checkpoint that is served under its own scaling."""
    method = native.method
    rope_type = method.scaling.rope_type
    if rope_type in SWITCHING:
        tiers = build_tiers(method, native, options.rope_tiers)
        return _Own(method, options.rope_policy or _SWITCHING_POLICY, tiers)
    if options.rope_tiers is not None:
        raise RopeConfigError(
            "rope_tiers",
            f"needs a rope_policy such as {DEFAULT_POLICY}: the checkpoint was trained with "
            f"{rope_type}, and is served under its one table",
        )
    tiers = (native_tier(native, native.native_len),)
    return _Own(method, options.rope_policy or "fixed", tiers)


def _method(
    block: Mapping[str, Any], native: NativeRope, multiples: Sequence[float] | None
) -> Method:
    """Return the block's method; the largest multiple replaces an absent factor."""
    takes_factor = block.get("factor") is None and rope_type_of(block) != "default"
    standing_in = multiples if takes_factor else None
    if standing_in:
        block = {**block, "factor": max(standing_in)}
    try:
        return parse_method(block, native.rotary, native.native_len)
    except RopeConfigError as error:
        if standing_in and error.field == "factor":
            raise RopeConfigError("rope_tiers", f"the largest {error.problem}") from error
        raise


def _refuse_two_lengths(method: Method, multiples: Sequence[float] | None) -> None:
    """Raise if the method's factor differs from the last multiple, as no tier would use it."""
    # Default has no factor; the factor of the other two is part of the formula on any tier.
    if not multiples or method.scaling.rope_type in ("default", "dynamic", "longrope"):
        return
    if multiples[-1] != method.factor:
        raise RopeConfigError(
            "rope_tiers",
            f"ends at {multiples[-1]:g}, but the factor of rope_scaling is {method.factor:g}: make "
            "them equal, or leave one out",
        )


def _check_override(block: Mapping[str, Any], native: NativeRope) -> None:
    """Raise if a block conflicts with the whole checkpoint."""
    share = block.get("partial_rotary_factor")
    if share is not None and share != native.partial_rotary_factor:
        raise RopeConfigError(
            "partial_rotary_factor",
            f"is {native.partial_rotary_factor:g} in the model, and cannot be changed; got {share}",
        )
    stated = block.get("original_max_position_embeddings") is not None
    if native.carries_scaling and not stated and rope_type_of(block) != "default":
        raise RopeConfigError(
            "original_max_position_embeddings",
            "must be stated to replace a block that the checkpoint was trained with",
        )


def _max_factor(max_rope_factor: float | None, tiers: Sequence[Tier]) -> float:
    highest = tiers[-1].factor
    if max_rope_factor is None:
        return highest
    if max_rope_factor > highest:
        raise RopeConfigError(
            "max_rope_factor",
            f"must be <= {highest:g}, the factor of the longest tier; got {max_rope_factor:g}",
        )
    return max_rope_factor


def _max_len(max_model_len: int | None, tiers: Sequence[Tier], *, trained: str | None) -> int:
    """Return the longest context; `trained`: the method of a checkpoint's own block, if served."""
    if max_model_len is not None and max_model_len > longest(tiers):
        advice = "a larger rope_scaling factor makes longer tiers"
        if trained is not None:
            advice = (
                "a rope_scaling with a larger factor and original_max_position_embeddings replaces "
                f"the {trained} that the checkpoint was trained with"
            )
        raise RopeConfigError(
            "max_model_len",
            f"must be <= the longest tier ({longest(tiers)} tokens), got {max_model_len}; {advice}",
        )
    return max_model_len or longest(tiers)
