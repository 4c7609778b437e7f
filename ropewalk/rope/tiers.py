"""Tiers, and the choice of a request's tier, which is the main purpose of this server.

A tier is a length ceiling and the table that serves up to it. A request's tier depends on its
tokens so far and its policy alone, never on max_tokens or on other requests.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ropewalk.rope.errors import RopeConfigError
from ropewalk.rope.from_config import Method
from ropewalk.rope.methods import Scaling
from ropewalk.rope.native import NativeRope
from ropewalk.rope.positions import PositionMethod

# The tokens that are there choose a request's tier, or under `fixed` the operator does.
Policy = Literal["by_position", "grow", "grow-exact", "fixed"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
# Release 0.1 chose the tier of `pinned` by max_tokens. Without that, it is `grow`.
OTHER_POLICY_NAMES: Mapping[str, Policy] = {"pinned": "grow"}


@dataclass(frozen=True, slots=True)
class Profile:
    """The resolved table of a sequence. Two equal profiles rotate equally, to the bit."""

    scaling: Scaling  # of the layers that are scaled; the others keep their native table
    logn_len: int | None = None  # L of the log-n switch, None when off
    positions: PositionMethod | None = None  # None: every key at its own position

    @property
    def name(self) -> str:
        """Return the rope_type, with the position method if there is one: `default+rerope`."""
        rope_type = self.scaling.rope_type
        return rope_type if self.positions is None else f"{rope_type}+{self.positions.method}"

    @property
    def native(self) -> "Profile":
        return Profile(self.scaling)

    @property
    def num_native(self) -> int:
        """Return the number of first positions whose states are those of `native`, to the bit."""
        if self.positions is None:
            return 0
        num_native = self.positions.num_native
        return num_native if self.logn_len is None else min(num_native, self.logn_len)


@dataclass(frozen=True, slots=True)
class Tier:
    """One ceiling and its table."""

    ceiling: int  # tokens
    factor: float  # ceiling / L, reported to clients
    profile: Profile
    num_trained: int | None = None  # tokens that its table is made for, if fewer than the ceiling

    @property
    def label(self) -> str:
        """Return the factor, for example `4x`, or the position method, which has none."""
        method = self.profile.positions
        return f"{self.factor:g}x" if method is None else method.method

    def is_beyond(self, num_positions: int) -> bool:
        """Return whether some of these positions are more than its table is made for."""
        return self.num_trained is not None and num_positions > self.num_trained


def longest(tiers: Sequence[Tier]) -> int:
    return tiers[-1].ceiling


def default_multiples(factor: float) -> tuple[float, ...]:
    """Return the powers of two up to the factor, and the factor itself: 6 -> 1, 2, 4, 6."""
    powers = [1.0]
    while powers[-1] * 2 < factor:
        powers.append(powers[-1] * 2)
    return (*powers, factor) if factor > 1 else (1.0,)


def build_tiers(
    method: Method, native: NativeRope, multiples: Sequence[float] | None = None
) -> tuple[Tier, ...]:
    """Build the ascending tiers of `method`; the first ends at L and is always the native table.

    `multiples` of L replace the default list; they must rise strictly and start at 1.
    """
    if multiples is None:
        # LongRoPE has two tables, so ceilings in between would change nothing.
        multiples = default_multiples(method.factor)
        if method.scaling.rope_type == "longrope":
            multiples = tuple(dict.fromkeys((1.0, method.factor)))
    _check_multiples(multiples)
    return tuple(_tier(method, native, multiple) for multiple in multiples)


def fixed_tier(method: Method) -> Tier:
    """Return policy `fixed`'s only tier: the configured factor at every length, even below L."""
    ceiling = round(method.native_len * method.factor)
    return Tier(ceiling, method.factor, _profile(method, ceiling))


def native_tier(native: NativeRope, ceiling: int) -> Tier:
    """Return the checkpoint's own table at any length: `{"rope_type": "default"}` in a request."""
    scaling = native.tables[native.scaled_layer_type].scaling
    num_trained = native.native_len if ceiling > native.native_len else None
    return Tier(ceiling, native.method.factor, Profile(scaling), num_trained)


def choose_tier(
    tiers: Sequence[Tier], num_so_far: int, num_covered: int, at_least: float = 1.0
) -> Tier | None:
    """Return the tier of the tokens so far, or None if no tier can hold the finished request.

    num_covered: positions the finished request will have rotated, prompt + max_tokens - 1. They
    never choose the tier.
    at_least: the factor in the request, raised to the next tier.
    """
    if num_covered > longest(tiers):
        return None
    for tier in tiers:
        if tier.ceiling >= num_so_far and tier.factor >= at_least:
            return tier
    return None


def _tier(method: Method, native: NativeRope, multiple: float) -> Tier:
    ceiling = round(method.native_len * multiple)
    if multiple == 1:
        scaling = native.tables[native.scaled_layer_type].scaling
        if scaling.rope_type == "longrope" and scaling == method.scaling:
            # A LongRoPE checkpoint's native table up to L is its short list.
            scaling = scaling.at(ceiling, method.native_len)
        return Tier(ceiling, 1.0, Profile(scaling))
    own = multiple == method.factor
    factor = method.factor if own else ceiling / method.native_len
    return Tier(ceiling, factor, _profile(method, ceiling))


def _profile(method: Method, ceiling: int) -> Profile:
    scaling = method.scaling.at(ceiling, method.native_len)
    return Profile(scaling, method.native_len if method.use_logn_attn else None)


def _check_multiples(multiples: Sequence[float]) -> None:
    rising = all(low < high for low, high in itertools.pairwise(multiples))
    if not multiples or multiples[0] != 1 or not rising:
        given = ",".join(f"{multiple:.12g}" for multiple in multiples)
        raise RopeConfigError("rope_tiers", f"must rise strictly from 1, got {given or 'nothing'}")
