"""Rotary position embeddings as plain arithmetic: frequencies, tiers, angles, rotation.

The package uses torch and plain values only: no models, no I/O, and no state between calls. A name
is imported when it is first used, because settings need its words and not torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ropewalk.rope.errors import (
    OTHER_POLICY_NAMES,
    POLICIES,
    POSITION_METHODS,
    ROPE_TYPES,
    SWITCHING,
    Policy,
)

if TYPE_CHECKING:
    from ropewalk.rope.angles import (
        Angles,
        half_split_from_interleaved,
        logn_scale,
        offset_angles,
        page_start_angles,
        position_angles,
        rotate,
    )
    from ropewalk.rope.decay import Moments, decay_bound, expected_score, score_spread
    from ropewalk.rope.errors import RopeConfigError
    from ropewalk.rope.frequencies import Frequencies, Rotary, Scaling, Unscaled
    from ropewalk.rope.from_config import Method, parse_method, rope_type_of
    from ropewalk.rope.methods import NTK, DynamicNTK, Linear, Llama3, LongRope, Yarn
    from ropewalk.rope.native import ALL_LAYERS, NativeRope, NativeTable, native_rope
    from ropewalk.rope.positions import MOST_RANGES, DualChunk, KeyMap, PositionMethod, Range
    from ropewalk.rope.positions_from_block import PositionChoice, parse_positions
    from ropewalk.rope.tiers import (
        Profile,
        Tier,
        build_tiers,
        choose_tier,
        default_multiples,
        fixed_tier,
        longest,
        native_tier,
        position_tiers,
    )
    from ropewalk.rope.two_ranges import ReRope, SelfExtend, Shifted, Sinks

# module -> its public names
_HOMES = {
    "angles": (
        "Angles",
        "half_split_from_interleaved",
        "logn_scale",
        "offset_angles",
        "page_start_angles",
        "position_angles",
        "rotate",
    ),
    "decay": ("Moments", "decay_bound", "expected_score", "score_spread"),
    "errors": ("RopeConfigError",),
    "frequencies": ("Frequencies", "Rotary", "Scaling", "Unscaled"),
    "from_config": ("Method", "parse_method", "rope_type_of"),
    "methods": ("NTK", "DynamicNTK", "Linear", "Llama3", "LongRope", "Yarn"),
    "native": ("ALL_LAYERS", "NativeRope", "NativeTable", "native_rope"),
    "positions": ("MOST_RANGES", "DualChunk", "KeyMap", "PositionMethod", "Range"),
    "positions_from_block": ("PositionChoice", "parse_positions"),
    "tiers": (
        "Profile",
        "Tier",
        "build_tiers",
        "choose_tier",
        "default_multiples",
        "fixed_tier",
        "longest",
        "native_tier",
        "position_tiers",
    ),
    "two_ranges": ("ReRope", "SelfExtend", "Shifted", "Sinks"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ALL_LAYERS",
    "MOST_RANGES",
    "NTK",
    "OTHER_POLICY_NAMES",
    "POLICIES",
    "POSITION_METHODS",
    "ROPE_TYPES",
    "SWITCHING",
    "Angles",
    "DualChunk",
    "DynamicNTK",
    "Frequencies",
    "KeyMap",
    "Linear",
    "Llama3",
    "LongRope",
    "Method",
    "Moments",
    "NativeRope",
    "NativeTable",
    "Policy",
    "PositionChoice",
    "PositionMethod",
    "Profile",
    "Range",
    "ReRope",
    "RopeConfigError",
    "Rotary",
    "Scaling",
    "SelfExtend",
    "Shifted",
    "Sinks",
    "Tier",
    "Unscaled",
    "Yarn",
    "build_tiers",
    "choose_tier",
    "decay_bound",
    "default_multiples",
    "expected_score",
    "fixed_tier",
    "half_split_from_interleaved",
    "logn_scale",
    "longest",
    "native_rope",
    "native_tier",
    "offset_angles",
    "page_start_angles",
    "parse_method",
    "parse_positions",
    "position_angles",
    "position_tiers",
    "rope_type_of",
    "rotate",
    "score_spread",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and keep the name here."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rope' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
