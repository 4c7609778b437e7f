"""Needles in a haystack: the eight `niah_` tasks (RULER's scripts/data/synthetic/niah.py)."""

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.studies.ruler.sample import Draft, Encode, Maker, rng_of
from ropewalk.studies.ruler.templates import NEEDLE, NIAH, NOISE, NUM_DEPTHS, SINGULAR
from ropewalk.studies.ruler.words import ADJECTIVES, NOUNS

_NOISE, _ESSAY, _NEEDLES = "noise", "essay", "needles"
_NUMBERS, _UUIDS, _WORDS = "numbers", "uuids", "words"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Needles:
    """The parameters of a task."""

    haystack: str
    keys: str = _WORDS
    values: str = _NUMBERS
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1

    @property
    def reads_essays(self) -> bool:
        return self.haystack == _ESSAY

    @property
    def num_needles(self) -> int:
        """Return the number of needles with an own key or value."""
        return self.num_keys * self.num_values


NIAH_TASKS = {
    "niah_single_1": Needles(_NOISE),
    "niah_single_2": Needles(_ESSAY),
    "niah_single_3": Needles(_ESSAY, values=_UUIDS),
    "niah_multikey_1": Needles(_ESSAY, num_keys=4),
    "niah_multikey_2": Needles(_NEEDLES),
    "niah_multikey_3": Needles(_NEEDLES, keys=_UUIDS, values=_UUIDS),
    "niah_multivalue": Needles(_ESSAY, num_values=4),
    "niah_multiquery": Needles(_ESSAY, num_keys=4, num_queries=4),
}


def niah_maker(needles: Needles, essay: Sequence[str], seed: object) -> Maker:
    """Return the maker of one sample. `essay` has the words of the haystack's text.

    Keys, values, depths and questions are the same with any number of units. A unit is a line of
    noise, a needle, or a word of the essay.
    """
    rng = rng_of(seed, "needles")
    keys = _distinct(needles.num_keys, lambda: _value(needles.keys, rng))
    values = {
        key: _distinct(needles.num_values, lambda: _value(needles.values, rng)) for key in keys
    }
    lines = [_needle(needles, key, value) for key in keys for value in values[key]]
    rng.shuffle(lines)
    asked = rng.sample(keys, needles.num_queries)
    outputs = tuple(value for key in asked for value in values[key])
    places = [rng.random() for _ in lines]
    depths = sorted(
        round(100 * step / (NUM_DEPTHS - 1)) for step in rng.sample(range(NUM_DEPTHS), len(lines))
    )

    def build(num_units: int) -> Draft:
        if needles.reads_essays:
            context = _in_essay(essay[:num_units], lines, depths)
        else:
            units = _units(needles, num_units, set(keys), seed)
            for place, line in zip(sorted(places, reverse=True), lines, strict=True):
                units.insert(int(place * num_units), line)
            context = "\n".join(units)
        return _draft(needles, context, asked, outputs)

    most = len(essay) if needles.reads_essays else None
    return Maker(build, NIAH.answer_tokens, least=1, most=most)


def answer_position(draft: Draft, encode: Encode) -> int:
    """Return the number of tokens before the first reference, RULER's `token_position_answer`."""
    return len(encode(draft.input[: draft.input.index(draft.outputs[0])]))


def _units(needles: Needles, count: int, taken: set[str], seed: object) -> list[str]:
    """Return lines of noise, or needles with other keys; fewer lines are the first of more."""
    if needles.haystack == _NOISE:
        return [NOISE] * count
    rng = rng_of(seed, "units")
    lines: list[str] = []
    while len(lines) < count:
        key, value = _value(needles.keys, rng), _value(needles.values, rng)
        if key not in taken:
            lines.append(_needle(needles, key, value))
    return lines


def _in_essay(words: Sequence[str], lines: Sequence[str], depths: Sequence[int]) -> str:
    """Return the text with needles after whole sentences, at these percents of the sentences."""
    sentences = _SENTENCE_END.split(" ".join(words))
    done = 0
    parts: list[str] = []
    for depth, line in zip(depths, lines, strict=True):
        at = len(sentences) * depth // 100
        parts += [*sentences[done:at], line]
        done = at
    return " ".join([*parts, *sentences[done:]])


def _draft(needles: Needles, context: str, asked: Sequence[str], outputs: tuple[str, ...]) -> Draft:
    question, answer_prefix, kind = NIAH.question, NIAH.answer_prefix, needles.values
    if needles.num_queries * needles.num_values == 1:
        for plural, singular in SINGULAR:
            question = question.replace(plural, singular)
            answer_prefix = answer_prefix.replace(plural, singular)
        kind = kind.removesuffix("s")
    query = asked[0]
    if len(asked) > 1:
        query = f"{', '.join(asked[:-1])}, and {asked[-1]}"
    return Draft(
        question.format(kind=kind, context=context, query=query),
        answer_prefix.format(kind=kind, query=query),
        outputs,
    )


def _needle(needles: Needles, key: str, value: str) -> str:
    return NEEDLE.format(kind=needles.values, key=key, value=value)


def _value(kind: str, rng: random.Random) -> str:
    """Return seven digits, a UUID of version 4, or an adjective and a noun."""
    if kind == _NUMBERS:
        return str(rng.randrange(10**6, 10**7))
    if kind == _UUIDS:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)
