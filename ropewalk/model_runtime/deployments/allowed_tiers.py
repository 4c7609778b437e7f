"""Build the tiers of scaling methods that requests may name, by the settings that allow them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ropewalk.model_runtime.deployments.deployment import Tiers
from ropewalk.rope import (
    ROPE_TYPES,
    LongRope,
    NativeRope,
    RopeConfigError,
    Tier,
    longest,
    rope_type_of,
)
from ropewalk.rope.from_config import Method, parse_method
from ropewalk.rope.tiers import build_tiers, fixed_tier, native_tier

# Their tables follow from a factor alone.
_BY_FACTOR = ("linear", "ntk", "yarn", "llama3")


def tiers_by_type(
    own: tuple[Tier, ...],
    method: Method,
    native: NativeRope,
    block: Mapping[str, Any] | None,
    *,
    allowed: Sequence[str] | None,
    exact_factors: Sequence[float] | None,
) -> dict[str, Tiers]:
    """Return the tiers of every scaling method that a request may name. Raises RopeConfigError.

    `own`: the deployment's, of `method`; `block`: that it was read from, None: the checkpoint's.
    """
    own_type, of_types = method.scaling.rope_type, {method.scaling.rope_type: own}
    has_positions = own[-1].profile.positions is not None
    if allowed is not None and native.carries_scaling and not has_positions:
        raise RopeConfigError(
            "allowed_rope_types", "has no meaning for a checkpoint that carries scaling, remove it"
        )
    if allowed is not None and own_type not in allowed:
        raise RopeConfigError(
            "allowed_rope_types",
            f"must contain {own_type}, the method of the deployment; got "
            f"{', '.join(allowed) or 'nothing'}",
        )
    if block is None:
        of_types["default"] = (native_tier(native, longest(own)),)
    elif not native.carries_scaling and not has_positions:
        of_types |= _other_types(own, method, native, allowed)
    exact = {}
    if exact_factors:
        exact = _exact_tiers(exact_factors, block, native, of_types, own[-1].factor)
    found = {name: Tiers(tiers, exact.get(name, ())) for name, tiers in of_types.items()}
    if own[0].profile.scaling.rope_type == "default":
        found.setdefault("default", Tiers(own[:1], is_native_only=True))
    return found


def _other_types(
    own: tuple[Tier, ...], method: Method, native: NativeRope, allowed: Sequence[str] | None
) -> dict[str, tuple[Tier, ...]]:
    """Return the tiers of all other methods: same ceilings, each method's defaults."""
    has_lists = isinstance(method.scaling, LongRope)
    possible = [name for name in ROPE_TYPES if name != "longrope" or has_lists]
    tiers: dict[str, tuple[Tier, ...]] = {}
    for name in possible if allowed is None else allowed:
        if name not in possible:
            raise RopeConfigError(
                "allowed_rope_types", f"accepts {', '.join(possible)} here; got {name!r}"
            )
        if name == method.scaling.rope_type:
            continue
        if name == "default":
            tiers[name] = (native_tier(native, longest(own)),)
            continue
        # `dynamic` has its own factor beside the tier's; 1 is the plain form of the paper.
        block = {
            "rope_type": name,
            "factor": 1.0 if name == "dynamic" else own[-1].factor,
            "original_max_position_embeddings": method.native_len,
        }
        other = parse_method(block, native.rotary, native.native_len)
        tiers[name] = build_tiers(other, native, [tier.factor for tier in own])
    return tiers


def _exact_tiers(
    factors: Sequence[float],
    block: Mapping[str, Any] | None,
    native: NativeRope,
    names: Iterable[str],
    highest: float,
) -> dict[str, tuple[Tier, ...]]:
    """Return the tiers of the factors for each method whose table follows from a factor.

    `block`: the deployment's own, whose other fields stay; `highest`: the largest factor.
    """
    if native.carries_scaling or block is None or "positions" in block:
        raise RopeConfigError(
            "exact_rope_factors", "goes with a method that stretches by a factor, remove it"
        )
    for factor in factors:
        if not 1 <= factor <= highest:
            raise RopeConfigError(
                "exact_rope_factors",
                f"must be from 1 to {highest:g}, the factor of the longest tier; got {factor:g}",
            )
    length = block.get("original_max_position_embeddings")
    found = {}
    for name in _BY_FACTOR:
        if name not in names:
            continue
        of_method: Mapping[str, Any] = {
            "rope_type": name,
            "original_max_position_embeddings": length,
        }
        if name == rope_type_of(block):
            of_method = block
        found[name] = tuple(
            fixed_tier(
                parse_method({**of_method, "factor": factor}, native.rotary, native.native_len)
            )
            for factor in factors
        )
    return found
