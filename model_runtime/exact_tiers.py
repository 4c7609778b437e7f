"""Tiers for requests that name a factor exactly, beside those that lengths choose among."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rope import NativeRope, RopeConfigError, Tier, fixed_tier, parse_method, rope_type_of

_FIELD = "exact_rope_factors"
# Their tables follow from a factor alone.
_BY_FACTOR = frozenset({"linear", "ntk", "yarn", "llama3"})


def exact_tiers(
    factors: Sequence[float] | None,
    block: Mapping[str, Any] | None,
    native: NativeRope,
    tiers: Mapping[str, Sequence[Tier]],
) -> dict[str, tuple[Tier, ...]]:
    """Return the tiers of the factors for each method of `tiers` whose table follows from a factor.

    `block`: the deployment's own, whose other fields stay. Raises RopeConfigError.
    """
    if not factors:
        return {}
    if native.carries_scaling or block is None or "positions" in block:
        raise RopeConfigError(_FIELD, "goes with a method that stretches by a factor, remove it")
    own_type = rope_type_of(block)
    highest = tiers[own_type][-1].factor
    for factor in factors:
        if not 1 <= factor <= highest:
            raise RopeConfigError(
                _FIELD,
                f"must be from 1 to {highest:g}, the factor of the longest tier; got {factor:g}",
            )
    found = {}
    for name in _BY_FACTOR.intersection(tiers):
        of_method = {**block} if name == own_type else {"rope_type": name}
        length = block.get("original_max_position_embeddings")
        found[name] = tuple(_tiers(factors, of_method, length, native))
    return found


def _tiers(
    factors: Iterable[float], block: Mapping[str, Any], length: int | None, native: NativeRope
) -> Iterable[Tier]:
    for factor in factors:
        exact = {**block, "factor": factor, "original_max_position_embeddings": length}
        yield fixed_tier(parse_method(exact, native.rotary, native.native_len))
