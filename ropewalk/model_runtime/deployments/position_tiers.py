"""The tiers of a deployment's position methods, and the one that a request may name.

A position method goes with one table: the checkpoint's own. Under `pinned` its first tier is the
model as it was trained, and the next one has the method. Under `always` there is one tier, so a
token's state never depends on the length that follows, and no policy changes a bit of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ropewalk.model_runtime.errors import RequestError
from ropewalk.rope import (
    POSITION_METHODS,
    SWITCHING,
    NativeRope,
    PositionChoice,
    Profile,
    RopeConfigError,
    Tier,
    default_multiples,
    fixed_tier,
    parse_method,
    parse_positions,
    rope_type_of,
)

DEFAULT_REACH = 16  # times L, if the method has no limit and the settings name none


def own_position_tiers(
    block: Mapping[str, Any], native: NativeRope, max_model_len: int | None, page_size: int
) -> tuple[Tier, ...] | None:
    """Return the tiers of a rope block whose `positions` name a method; None if they name none.

    Raises RopeConfigError if the block's table is not the checkpoint's own.
    """
    positions, trained = block.get("positions"), native.native_len
    if positions is None:
        return None
    ceiling = max_model_len or DEFAULT_REACH * trained
    choice = parse_positions(positions, trained, ceiling, page_size)
    if choice is None:
        return None
    _check_table(block, native)
    reach = choice.method.reach(trained)
    if reach is not None and reach < ceiling:
        if max_model_len is not None:
            raise RopeConfigError(
                "max_model_len",
                f"must be <= what {choice.method.method} reaches ({reach} tokens), got {ceiling}",
            )
        ceiling = reach
    if choice.when == "pinned" and ceiling <= trained:
        raise RopeConfigError(
            "positions.when",
            f"is pinned, which begins beyond the trained length ({trained}), but the "
            f"longest context is {ceiling} tokens; always begins at the first token",
        )
    logn = block.get("use_logn_attn")
    uses_logn = choice.uses_logn if logn is None else bool(logn)
    return _tiers(choice, native, ceiling, uses_logn=uses_logn)


def allowed_position_tiers(
    names: Sequence[str] | None,
    own: tuple[Tier, ...],
    native: NativeRope,
    longest: int,
    page_size: int,
) -> dict[str, tuple[Tier, ...]]:
    """Return the tiers of every method that a request may name, under the methods' defaults.

    `own`: the deployment's tiers; `longest`: the tokens of its longest request. Raises
    RopeConfigError.
    """
    method = own[-1].profile.positions
    found = {} if method is None else {method.method: own, "native": _native_tiers(native)}
    if names is None:
        return found
    if method is not None and method.method not in names:
        raise RopeConfigError(
            "allowed_positions",
            f"must contain {method.method}, the method of the deployment; got {', '.join(names)}",
        )
    allowed = {}
    for name in names:
        if name not in POSITION_METHODS:
            raise RopeConfigError(
                "allowed_positions", f"accepts {', '.join(POSITION_METHODS)}; got {name!r}"
            )
        if native.carries_scaling and name not in found:
            raise RopeConfigError(
                "allowed_positions",
                "has no meaning for a checkpoint that carries scaling, remove it",
            )
        if name in found:
            allowed[name] = found[name]
        elif name == "native":
            allowed[name] = _native_tiers(native)
        else:
            allowed[name] = _default_tiers(name, native, longest, page_size)
    return allowed


def _default_tiers(name: str, native: NativeRope, longest: int, page_size: int) -> tuple[Tier, ...]:
    """Return the tiers of a method under its defaults. Raises RopeConfigError."""
    trained = native.native_len
    choice = parse_positions({"method": name}, trained, longest, page_size)
    assert choice is not None
    reach = choice.method.reach(trained)
    ceiling = longest if reach is None else min(longest, reach)
    if choice.when == "pinned" and ceiling <= trained:
        raise RopeConfigError(
            "allowed_positions",
            f"names {name}, which begins beyond the trained length ({trained}), but the "
            f"longest context is {ceiling} tokens",
        )
    return _tiers(choice, native, ceiling, uses_logn=choice.uses_logn)


def asked_position_tiers(
    asked: Mapping[str, Any], possible: Mapping[str, tuple[Tier, ...]]
) -> tuple[Tier, ...]:
    """Return the tiers of the method that a request names. Raises RequestError.

    Its other fields are those that answers report. They must be the method's own, so that clients
    cannot increase the number of tables.
    """
    name = str(asked.get("method"))
    if name not in possible:
        accepted = f"one of {', '.join(sorted(possible))} (allowed_positions)"
        if not possible:
            accepted = "absent, unless the operator allows methods with allowed_positions"
        raise RequestError(
            f"`rope.positions.method` must be {accepted}. Given: {name}",
            param="rope.positions.method",
        )
    tiers = possible[name]
    method = tiers[-1].profile.positions
    own = {"method": name} if method is None else method.described()
    for field, value in asked.items():
        if field not in own or own[field] != value:
            is_field = f"must be {own[field]}" if field in own else "is not a field of this method"
            raise RequestError(
                f"`rope.positions.{field}` {is_field}, as the server has it. Given: {value}",
                param=f"rope.positions.{field}",
            )
    return tiers


def _check_table(block: Mapping[str, Any], native: NativeRope) -> None:
    """Raise if the block names another table than the checkpoint's own."""
    rope_type = rope_type_of(block)
    if native.carries_scaling:
        own = native.method.scaling.rope_type
        if block.get("rope_type") is not None or block.get("type") is not None:
            raise RopeConfigError(
                "positions",
                f"goes with the checkpoint's own table ({own}): leave rope_type out; got "
                f"{rope_type}",
            )
        if own in SWITCHING:
            raise RopeConfigError(
                "positions", f"is not served with {own} yet, whose table depends on the length"
            )
    elif rope_type != "default":
        raise RopeConfigError(
            "positions", f"goes with rope_type default, the trained table; got {rope_type}"
        )


def _native_tiers(native: NativeRope) -> tuple[Tier, ...]:
    scaling = native.tables[native.scaled_layer_type].scaling
    return (Tier(native.native_len, native.method.factor, Profile(scaling)),)


def _tiers(
    choice: PositionChoice, native: NativeRope, ceiling: int, *, uses_logn: bool
) -> tuple[Tier, ...]:
    """Return the ascending tiers; more than one with the method only if it follows the ceiling."""
    scaling, trained = native.tables[native.scaled_layer_type].scaling, native.native_len
    multiples: tuple[float, ...] = (ceiling / trained,)
    if choice.follows_ceiling and ceiling > trained:
        multiples = default_multiples(ceiling / trained)
    tiers = []
    for multiple in multiples:
        end = ceiling if multiple == multiples[-1] else round(trained * multiple)
        if choice.when == "pinned" and end <= trained:
            continue
        method = choice.at(end, trained)
        profile = Profile(scaling, trained if uses_logn else None, method)
        tiers.append(Tier(end, native.method.factor, profile))
    first = _native_tiers(native) if choice.when == "pinned" else ()
    return (*first, *tiers)


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
        found[name] = tuple(_exact(factors, of_method, length, native))
    return found


def _exact(
    factors: Iterable[float], block: Mapping[str, Any], length: int | None, native: NativeRope
) -> Iterable[Tier]:
    for factor in factors:
        exact = {**block, "factor": factor, "original_max_position_embeddings": length}
        yield fixed_tier(parse_method(exact, native.rotary, native.native_len))
