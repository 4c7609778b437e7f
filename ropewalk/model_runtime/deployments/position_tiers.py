"""Build the tiers of position methods: the deployment's own, and those that requests may name."""

from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.model_runtime.deployments.deployment import Tiers
from ropewalk.rope import (
    POSITION_METHODS,
    SWITCHING,
    NativeRope,
    Profile,
    RopeConfigError,
    Tier,
    rope_type_of,
)
from ropewalk.rope.positions_from_block import PositionChoice, parse_positions
from ropewalk.rope.tiers import default_multiples, native_tier

_REACH = 16  # times L, of a method without a limit if the settings name no longest context


def own_position_tiers(
    block: Mapping[str, Any], native: NativeRope, max_model_len: int | None, page_size: int
) -> tuple[Tier, ...] | None:
    """Return the tiers of a block whose `positions` name a method; None if they name none.

    Raises RopeConfigError.
    """
    positions, trained = block.get("positions"), native.native_len
    if positions is None:
        return None
    longest_len = max_model_len or _REACH * trained
    choice = parse_positions(positions, trained, longest_len, page_size)
    if choice is None:
        return None
    _check_table(block, native)
    ceiling = _ceiling(choice, trained, longest_len)
    if ceiling < longest_len and max_model_len is not None:
        raise RopeConfigError(
            "max_model_len",
            f"must be <= what {choice.method.method} reaches ({ceiling} tokens), got {longest_len}",
        )
    if choice.when == "pinned" and ceiling <= trained:
        raise RopeConfigError(
            "positions.when",
            f"is pinned, which begins beyond the trained length ({trained}), but the "
            f"longest context is {ceiling} tokens; always begins at the first token",
        )
    logn = block.get("use_logn_attn")
    uses_logn = choice.uses_logn if logn is None else bool(logn)
    return _tiers(choice, native, ceiling, uses_logn=uses_logn)


def _check_table(block: Mapping[str, Any], native: NativeRope) -> None:
    """Raise if a block with positions names another table than the checkpoint's own."""
    rope_type = rope_type_of(block)
    if not native.carries_scaling:
        if rope_type != "default":
            raise RopeConfigError(
                "positions", f"goes with rope_type default, the trained table; got {rope_type}"
            )
        return
    own = native.method.scaling.rope_type
    if block.get("rope_type") is not None or block.get("type") is not None:
        raise RopeConfigError(
            "positions",
            f"goes with the checkpoint's own table ({own}): leave rope_type out; got {rope_type}",
        )
    if own in SWITCHING:
        raise RopeConfigError(
            "positions", f"is not served with {own} yet, whose table depends on the length"
        )


def tiers_by_positions(
    own: tuple[Tier, ...],
    native: NativeRope,
    longest_len: int,
    page_size: int,
    *,
    allowed: Sequence[str] | None,
) -> dict[str, Tiers]:
    """Return the tiers of every position method that a request may name, under its defaults.

    `own`: the deployment's tiers; `longest_len`: the tokens of its longest request. Raises
    RopeConfigError.
    """
    method = own[-1].profile.positions
    native_tiers = (native_tier(native, native.native_len),)
    found = {} if method is None else {method.method: own, "native": native_tiers}
    if allowed is None:
        return {name: Tiers(tiers) for name, tiers in found.items()}
    if method is not None and method.method not in allowed:
        raise RopeConfigError(
            "allowed_positions",
            f"must contain {method.method}, the method of the deployment; got {', '.join(allowed)}",
        )
    for name in allowed:
        if name not in POSITION_METHODS:
            raise RopeConfigError(
                "allowed_positions", f"accepts {', '.join(POSITION_METHODS)}; got {name!r}"
            )
        if native.carries_scaling and name not in found:
            raise RopeConfigError(
                "allowed_positions",
                "has no meaning for a checkpoint that carries scaling, remove it",
            )
        if name == "native":
            found[name] = native_tiers
        elif name not in found:
            found[name] = _default_tiers(name, native, longest_len, page_size)
    return {name: Tiers(found[name]) for name in allowed}


def _default_tiers(
    name: str, native: NativeRope, longest_len: int, page_size: int
) -> tuple[Tier, ...]:
    """Return the tiers of a position method under its defaults. Raises RopeConfigError."""
    trained = native.native_len
    choice = parse_positions({"method": name}, trained, longest_len, page_size)
    assert choice is not None
    ceiling = _ceiling(choice, trained, longest_len)
    if choice.when == "pinned" and ceiling <= trained:
        raise RopeConfigError(
            "allowed_positions",
            f"names {name}, which begins beyond the trained length ({trained}), but the "
            f"longest context is {ceiling} tokens",
        )
    return _tiers(choice, native, ceiling, uses_logn=choice.uses_logn)


def _ceiling(choice: PositionChoice, trained: int, longest_len: int) -> int:
    """Return the longest context that the method reaches."""
    reach = choice.method.reach(trained)
    return longest_len if reach is None else min(longest_len, reach)


def _tiers(
    choice: PositionChoice, native: NativeRope, ceiling: int, *, uses_logn: bool
) -> tuple[Tier, ...]:
    """Build the ascending tiers of a position method, which goes with the checkpoint's own table.

    Under `pinned` the first one is the model as it was trained. Under `always` a token's state
    never depends on the length that follows. More than one tier has the method only if the method
    follows the ceiling.
    """
    trained = native.native_len
    multiples: tuple[float, ...] = (ceiling / trained,)
    if choice.follows_ceiling and ceiling > trained:
        multiples = default_multiples(ceiling / trained)
    first = native_tier(native, trained)
    tiers = [first] if choice.when == "pinned" else []
    for multiple in multiples:
        end = ceiling if multiple == multiples[-1] else round(trained * multiple)
        if choice.when == "always" or end > trained:
            profile = Profile(
                first.profile.scaling,
                trained if uses_logn else None,
                choice.at(end, trained),
            )
            tiers.append(Tier(end, first.factor, profile))
    return tuple(tiers)
