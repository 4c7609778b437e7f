"""Rotary position embeddings as plain arithmetic: frequencies, tiers, angles, rotation.

The package uses torch and plain values only: no models, no I/O, and no state between calls.
"""

from rope.angles import Angles, offset_angles, page_start_angles, position_angles
from rope.decay import Moments, decay_bound, expected_score, score_spread
from rope.errors import RopeConfigError
from rope.frequencies import Frequencies, Rotary, Scaling, Unscaled
from rope.from_config import ROPE_TYPES, Method, parse_method, rope_type_of
from rope.linear import Linear
from rope.llama3 import Llama3
from rope.longrope import LongRope
from rope.native import ALL_LAYERS, NativeRope, NativeTable, native_rope
from rope.ntk import NTK, DynamicNTK
from rope.rotate import half_split_from_interleaved, logn_scale, rotate
from rope.tiers import (
    POLICIES,
    Policy,
    Profile,
    Tier,
    build_tiers,
    choose_tier,
    default_multiples,
    fixed_tier,
    longest,
    native_tier,
)
from rope.yarn import Yarn

__all__ = [
    "ALL_LAYERS",
    "NTK",
    "POLICIES",
    "ROPE_TYPES",
    "Angles",
    "DynamicNTK",
    "Frequencies",
    "Linear",
    "Llama3",
    "LongRope",
    "Method",
    "Moments",
    "NativeRope",
    "NativeTable",
    "Policy",
    "Profile",
    "RopeConfigError",
    "Rotary",
    "Scaling",
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
    "position_angles",
    "rope_type_of",
    "rotate",
    "score_spread",
]
