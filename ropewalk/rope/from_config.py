"""Parser of Hugging Face's rope block to a Scaling. Every field is used or refused by name.

A block is the config's `rope_scaling` (v4) or `rope_parameters` (v5), for example
`{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ropewalk.rope.errors import RopeConfigError
from ropewalk.rope.methods import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Rotary,
    Scaling,
    Unscaled,
    Yarn,
)

_MAX_FACTOR = 65_536.0  # above any practical factor; keeps ceilings and tier lists finite
_REFUSED = {
    "proportional": "'proportional' says which pairs of a checkpoint rotate, and is no scaling; "
    "leave rope_type out, or name a method",
    "mrope": "'mrope' says how a checkpoint numbers images, and is no scaling; leave rope_type "
    "out, or name a method",
}
# These fields describe the model of the block, not the scaling. parse_method compares the base.
# Callers that know the head's width compare partial_rotary_factor.
_GENERAL_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "use_logn_attn"),
    *("mrope_section", "mrope_interleaved", "original_max_position_embeddings"),
}
_SCALINGS: dict[str, type[Any]] = {
    "default": Unscaled,
    "linear": Linear,
    "ntk": NTK,
    "dynamic": DynamicNTK,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
}
ROPE_TYPES = tuple(_SCALINGS)


@dataclass(frozen=True, slots=True)
class Method:
    """A parsed block: the scaling, and the length that it reaches."""

    scaling: Scaling  # with the block's own values; a tier changes them with Scaling.at
    native_len: int  # L: the block's original_max_position_embeddings, or the model's own
    factor: float  # longest context / L
    use_logn_attn: bool = False


def parse_method(
    block: Mapping[str, Any],
    rotary: Rotary,
    native_len: int,
    served_len: int | None = None,
) -> Method:
    """Read a block for a model that rotates by `rotary` and was trained on `native_len` tokens.

    `served_len` is the length that a checkpoint gives beside its block (`max_position_embeddings`).
    If the block has no factor, served_len / L replaces it, as in transformers. Raises
    RopeConfigError.
    """
    rope_type = rope_type_of(block)
    _refuse_unknown_fields(block, rope_type)
    _refuse_another_model(block, rotary)
    _check_sections(block, rotary)
    length = _positive_int(block, "original_max_position_embeddings", native_len)
    use_logn_attn = _boolean(block, "use_logn_attn", default=False)
    if rope_type == "default":
        return Method(Unscaled(), length, 1.0, use_logn_attn)
    factor = _factor(block, length, served_len)
    scaling: Scaling
    match rope_type:
        case "linear":
            scaling = Linear(factor=factor)
        case "ntk":
            scaling = NTK(factor=factor)
        case "dynamic":
            scaling = DynamicNTK(
                factor=factor, original_max_position_embeddings=length, num_tokens=length
            )
        case "yarn":
            scaling = _yarn(block, length, factor)
        case "llama3":
            scaling = _llama3(block, length, factor)
        case _:
            scaling = _longrope(block, rotary, length, factor)
    return Method(scaling, length, factor, use_logn_attn)


def rope_type_of(block: Mapping[str, Any]) -> str:
    """Return the block's rope_type, under either key. Raises RopeConfigError if it is unknown."""
    if not isinstance(block, Mapping):
        raise RopeConfigError("rope_scaling", f"must be an object, got {block!r}")
    names = [block[key] for key in ("rope_type", "type") if block.get(key) is not None]
    if len(names) > 1 and names[0] != names[1]:
        raise RopeConfigError("rope_type", f"says {names[0]!r}, type {names[1]!r}")
    name = names[0] if names else "default"
    if not isinstance(name, str):
        raise RopeConfigError("rope_type", f"must be a string, got {name!r}")
    if name in _REFUSED:
        raise RopeConfigError("rope_type", _REFUSED[name])
    if name not in ROPE_TYPES:
        raise RopeConfigError("rope_type", f"must be one of {', '.join(ROPE_TYPES)}; got {name!r}")
    return name


def _refuse_unknown_fields(block: Mapping[str, Any], rope_type: str) -> None:
    # A tier sets num_tokens.
    own = {each.name for each in fields(_SCALINGS[rope_type])} - {"num_tokens"}
    accepted = _GENERAL_FIELDS | own
    for field, value in block.items():
        if field in accepted or value is None:
            continue
        names = ", ".join(sorted(accepted))
        raise RopeConfigError(field, f"is not a field of rope_type {rope_type!r} ({names})")


def _refuse_another_model(block: Mapping[str, Any], rotary: Rotary) -> None:
    theta = _positive(block, "rope_theta", rotary.rope_theta)
    if theta != rotary.rope_theta:
        raise RopeConfigError(
            "rope_theta",
            f"is {theta:g}, but the model was trained with {rotary.rope_theta:g}; to stretch the "
            "base use rope_type 'ntk'",
        )


def _check_sections(block: Mapping[str, Any], rotary: Rotary) -> None:
    """Check multimodal sections (Qwen2-VL, arXiv 2409.12191), which text does not need.

    A section of pairs has the position of a token in time, height or width. The three are equal for
    text, so every order of the sections is the plain rotation.
    """
    _boolean(block, "mrope_interleaved", default=False)
    sections = block.get("mrope_section")
    if sections is None:
        return
    counts = sections if isinstance(sections, list | tuple) else [None]
    if not all(type(each) is int and each >= 0 for each in counts):
        raise RopeConfigError(
            "mrope_section", f"must be a list of numbers of pairs, got {sections!r}"
        )
    if sum(counts) != rotary.num_pairs:
        raise RopeConfigError(
            "mrope_section",
            f"must add up to the {rotary.num_pairs} pairs of the model, got {sections!r}",
        )


def _factor(block: Mapping[str, Any], length: int, served_len: int | None) -> float:
    implied = served_len / length if served_len is not None else None
    factor = _positive(block, "factor", implied, minimum=1.0)
    if factor > _MAX_FACTOR:
        raise RopeConfigError("factor", f"must be <= {_MAX_FACTOR:g}, got {factor:g}")
    return factor


def _yarn(block: Mapping[str, Any], length: int, factor: float) -> Yarn:
    beta_fast = _positive(block, "beta_fast", 32.0)
    beta_slow = _positive(block, "beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise RopeConfigError(
            "beta_fast", f"must be >= beta_slow ({beta_slow:g}); got {beta_fast:g}"
        )
    return Yarn(
        factor=factor,
        original_max_position_embeddings=length,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=_attention_factor(block),
        mscale=_optional(block, "mscale"),
        mscale_all_dim=_optional(block, "mscale_all_dim"),
        truncate=_boolean(block, "truncate", default=True),
    )


def _llama3(block: Mapping[str, Any], length: int, factor: float) -> Llama3:
    low = _positive(block, "low_freq_factor", 1.0)
    high = _positive(block, "high_freq_factor", 4.0)
    if high <= low:
        raise RopeConfigError(
            "high_freq_factor", f"must be > low_freq_factor ({low:g}); got {high:g}"
        )
    return Llama3(
        factor=factor,
        original_max_position_embeddings=length,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(block: Mapping[str, Any], rotary: Rotary, length: int, factor: float) -> LongRope:
    return LongRope(
        short_factor=_divisors(block, "short_factor", rotary),
        long_factor=_divisors(block, "long_factor", rotary),
        factor=factor,
        original_max_position_embeddings=length,
        attention_factor=_attention_factor(block),
        num_tokens=length,
    )


def _number(block: Mapping[str, Any], field: str) -> float | None:
    value = block.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RopeConfigError(field, f"must be a finite number, got {value!r}")
    return float(value)


def _positive(
    block: Mapping[str, Any], field: str, default: float | None, minimum: float = 0.0
) -> float:
    value = _number(block, field)
    if value is None:
        value = default
    if value is None:
        raise RopeConfigError(field, "is missing")
    if value <= 0 or value < minimum:
        limit = f">= {minimum:g}" if minimum else "> 0"
        raise RopeConfigError(field, f"must be {limit}, got {value!r}")
    return value


def _optional(block: Mapping[str, Any], field: str) -> float | None:
    value = _number(block, field)
    if value is not None and value < 0:
        raise RopeConfigError(field, f"must be >= 0, got {value!r}")
    return value


def _attention_factor(block: Mapping[str, Any]) -> float | None:
    """Return the stated factor. transformers accepts 0, which makes every logit 0."""
    value = _number(block, "attention_factor")
    if value is not None and value <= 0:
        raise RopeConfigError("attention_factor", f"must be > 0, got {value!r}")
    return value


def _positive_int(block: Mapping[str, Any], field: str, default: int) -> int:
    value = block.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RopeConfigError(field, f"must be an integer >= 1, got {value!r}")
    return value


def _boolean(block: Mapping[str, Any], field: str, *, default: bool) -> bool:
    value = block.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RopeConfigError(field, f"must be true or false, got {value!r}")
    return value


def _divisors(block: Mapping[str, Any], field: str, rotary: Rotary) -> tuple[float, ...]:
    value = block.get(field)
    if not isinstance(value, list | tuple):
        raise RopeConfigError(field, f"must be a list of {rotary.num_pairs} numbers, got {value!r}")
    divisors = tuple(_positive({field: item}, field, None) for item in value)
    if len(divisors) != rotary.num_pairs:
        raise RopeConfigError(
            field, f"must have {rotary.num_pairs} numbers, one a pair; got {len(divisors)}"
        )
    return divisors
