"""Rotary position embeddings as plain arithmetic: frequencies, tiers, positions.

The package uses torch and plain values only: no models, no I/O, and no state between calls. These
names need no torch before they compute. `angles` and `decay` do, and are imported by themselves.
"""

from ropewalk.rope.errors import RopeConfigError
from ropewalk.rope.from_config import ROPE_TYPES, rope_type_of
from ropewalk.rope.methods import (
    NTK,
    SWITCHING,
    DynamicNTK,
    Frequencies,
    Linear,
    Llama3,
    LongRope,
    Rotary,
    Scaling,
    Unscaled,
    Yarn,
)
from ropewalk.rope.native import ALL_LAYERS, NativeRope, NativeTable, native_rope
from ropewalk.rope.position_methods import DualChunk, ReRope, SelfExtend, Shifted, Sinks
from ropewalk.rope.positions import MOST_RANGES, KeyMap, PositionMethod, Range
from ropewalk.rope.positions_from_block import POSITION_METHODS
from ropewalk.rope.tiers import (
    OTHER_POLICY_NAMES,
    POLICIES,
    Policy,
    Profile,
    Tier,
    choose_tier,
    longest,
)

__all__ = [
    "ALL_LAYERS",
    "MOST_RANGES",
    "NTK",
    "OTHER_POLICY_NAMES",
    "POLICIES",
    "POSITION_METHODS",
    "ROPE_TYPES",
    "SWITCHING",
    "DualChunk",
    "DynamicNTK",
    "Frequencies",
    "KeyMap",
    "Linear",
    "Llama3",
    "LongRope",
    "NativeRope",
    "NativeTable",
    "Policy",
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
    "choose_tier",
    "longest",
    "native_rope",
    "rope_type_of",
]
