"""Parser of the `positions` object inside a rope block. Every field is used or refused by name.

The defaults are those of the methods' authors, as fractions of the trained length L. Windows and
chunks are whole pages if they are large enough.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ropewalk.rope.errors import RopeConfigError
from ropewalk.rope.position_methods import DualChunk, ReRope, SelfExtend, Shifted, Sinks
from ropewalk.rope.positions import PositionMethod

When = Literal["pinned", "always"]
_FIELDS = {
    "dual_chunk": {"chunk_size", "local_size", "parameters", "temperature"},
    "rerope": {"window"},
    "self_extend": {"window", "group"},
    "string": {"shift", "window", "attention_factor"},
    "sinks": {"sinks", "window"},
}
POSITION_METHODS = ("native", *_FIELDS)


@dataclass(frozen=True, slots=True)
class PositionChoice:
    """A parsed object: the method, and from which length on it reads."""

    method: PositionMethod
    when: When  # pinned: for contexts beyond L; always: from the first token on
    uses_logn: bool  # unless the block says otherwise
    follows_ceiling: bool = False  # whether a temperature depends on the request's ceiling

    def at(self, ceiling: int, native_len: int) -> PositionMethod:
        """Return the method for requests of up to `ceiling` tokens."""
        if not self.follows_ceiling:
            return self.method
        assert isinstance(self.method, DualChunk)
        factor = 1.0 if ceiling <= native_len else 0.1 * math.log(ceiling / native_len) + 1.0
        return replace(self.method, temperature_factor=factor)


def parse_positions(
    block: Mapping[str, Any], native_len: int, ceiling: int, page_size: int = 1
) -> PositionChoice | None:
    """Read a `positions` object for a model that was trained on `native_len` tokens.

    `ceiling` is the longest context to serve, and `page_size` the one of the cache; defaults depend
    on both. Returns None for `native`. Raises RopeConfigError.
    """
    if not isinstance(block, Mapping):
        raise RopeConfigError("positions", f"must be an object, got {block!r}")
    name = block.get("method")
    if name not in POSITION_METHODS:
        raise RopeConfigError(
            "positions.method", f"must be one of {', '.join(POSITION_METHODS)}; got {name!r}"
        )
    accepted = {"method", *(() if name == "native" else ("when", *_FIELDS[name]))}
    for field, value in block.items():
        if field not in accepted and value is not None:
            names = ", ".join(sorted(accepted))
            raise RopeConfigError(
                f"positions.{field}", f"is not a field of the method {name!r} ({names})"
            )
    if name == "native":
        return None
    # `string` is for contexts inside L, which `pinned` would leave native.
    when: When = "always" if name == "string" else "pinned"
    if block.get("when") is not None:
        when = block["when"]
    if when not in get_args(When):
        raise RopeConfigError(
            "positions.when", f"must be one of {', '.join(get_args(When))}; got {when!r}"
        )
    choice = _PARSERS[name](_Given(block, native_len, ceiling, page_size), when)
    choice.method.check_pages(page_size)
    return choice


@dataclass(frozen=True, slots=True)
class _Given:
    """An object's fields, and what their defaults depend on."""

    block: Mapping[str, Any]
    native_len: int  # L
    ceiling: int
    page_size: int

    def tokens(self, field: str, default: int, most: int, of: str, least: int = 1) -> int:
        """Return a number of tokens between `least` and `most`. `of` says what the most is."""
        value = self.block.get(field)
        if value is None:
            value = max(least, min(default, most))
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RopeConfigError(
                f"positions.{field}", f"must be an integer >= {least}, got {value!r}"
            )
        if value > most:
            raise RopeConfigError(f"positions.{field}", f"must be <= {of} ({most}), got {value}")
        return value

    def in_pages(self, num_tokens: int) -> int:
        """Return the whole pages in a number of tokens, at least one, in tokens."""
        return max(1, num_tokens // self.page_size) * self.page_size

    def word(self, field: str, words: tuple[str, ...]) -> str:
        """Return one of some words, by default the first."""
        value = self.block.get(field) or words[0]
        if value not in words:
            raise RopeConfigError(
                f"positions.{field}", f"must be one of {', '.join(words)}; got {value!r}"
            )
        return str(value)


def _rerope(given: _Given, when: When) -> PositionChoice:
    trained = given.native_len
    window = given.tokens("window", given.in_pages(trained // 2), trained, "the trained length")
    return PositionChoice(ReRope(window), when, uses_logn=True)


def _self_extend(given: _Given, when: When) -> PositionChoice:
    trained = given.native_len
    default = given.in_pages(trained // 4)
    if default >= trained * 2 // 3:  # a page is so large that it would leave nothing to group
        default = 1 << int(math.log2(max(1, trained // 4)))
    window = given.tokens("window", default, trained - 1, "the trained length less 1")
    group = given.block.get("group")
    if group is None:
        group = _default_group(given, window)
    group = given.tokens("group", group, window, "the window")
    if window % group:
        raise RopeConfigError("positions.group", f"must divide the window ({window}), got {group}")
    return PositionChoice(SelfExtend(window, group), when, uses_logn=False)


def _default_group(given: _Given, window: int) -> int:
    """Return the smallest power of two of the authors' rule, or else a group that divides w.

    By the rule, the largest distance is at most two thirds of L. If no group that divides w and
    fits the pages is so large, the largest one is returned, and the method reaches less.
    """
    room = max(1, given.native_len * 2 // 3 - window)
    needed = max(1, math.ceil((given.ceiling - window) / room))
    group = 1 << math.ceil(math.log2(needed))
    if window % group == 0:
        return group
    page = given.page_size
    dividing = [each for each in range(1, window + 1) if window % each == 0]
    possible = [each for each in dividing if page % each == 0 or each % page == 0]
    return next((each for each in possible if each >= needed), possible[-1])


def _string(given: _Given, when: When) -> PositionChoice:
    trained = given.native_len
    shift = given.tokens("shift", trained // 3, trained, "the trained length")
    window = given.tokens("window", min(128, shift // 2), shift, "the shift")
    factor = given.block.get("attention_factor")
    if factor is None:
        factor = 1.0
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not 0 < factor < math.inf:
        raise RopeConfigError(
            "positions.attention_factor", f"must be a finite number > 0, got {factor!r}"
        )
    return PositionChoice(Shifted(shift, window, float(factor)), when, uses_logn=False)


def _sinks(given: _Given, when: When) -> PositionChoice:
    trained = given.native_len
    sinks = given.tokens("sinks", 4, trained - 1, "the trained length less 1")
    most = trained - sinks
    window = given.tokens("window", most, most, "the trained length less the sinks")
    return PositionChoice(Sinks(sinks, window), when, uses_logn=False)


def _dual_chunk(given: _Given, when: When) -> PositionChoice:
    trained = given.native_len
    parameters = given.word("parameters", ("chunkllama", "paper", "qwen"))
    temperature = given.word("temperature", ("none", "logn", "qwen"))
    # C and M as the three sources have them; chunks are whole pages.
    size, chunk = {
        "chunkllama": (trained * 3 // 4, trained * 5 // 8),
        "paper": (trained - 1, trained * 3 // 4),
        "qwen": (trained, trained - trained // 32),
    }[parameters]
    size = given.tokens("chunk_size", size, trained, "the trained length", least=2)
    if given.block.get("chunk_size") is not None:
        chunk = min(chunk, size - 1)
    local = size - given.in_pages(chunk)
    local = given.tokens("local_size", local, size - 1, "the chunk size less 1")
    return PositionChoice(
        DualChunk(size, local),
        when,
        uses_logn=temperature == "logn",
        follows_ceiling=temperature == "qwen",
    )


_PARSERS: dict[str, Callable[[_Given, When], PositionChoice]] = {
    "dual_chunk": _dual_chunk,
    "rerope": _rerope,
    "self_extend": _self_extend,
    "string": _string,
    "sinks": _sinks,
}
