"""Variable tracking: `vt` (RULER's scripts/data/synthetic/variable_tracking.py)."""

import random
import string
from itertools import pairwise

from ropewalk.studies.ruler.sample import Draft, Encode, Maker, rng_of
from ropewalk.studies.ruler.templates import (
    NOISE,
    VT,
    VT_EXAMPLE_LETTERS,
    VT_EXAMPLE_TOKENS,
    VT_EXAMPLE_VALUE,
    VT_HOPS,
    VT_LETTERS,
)

_EXAMPLE_SHARE = 4  # of a context, 1 / this at most, because RULER's 500 tokens may be all of it


def vt_maker(context_len: int, seed: object, encode: Encode) -> Maker:
    """Return the maker of one sample, whose units are lines of noise.

    The prompt begins with a solved example. RULER's has 500 tokens with its answer. Here it also
    has at most a quarter of the context, and at least one line of noise.
    """
    rng = rng_of(seed, "chain")
    names = _names(rng, VT_LETTERS)
    value = str(rng.randrange(10_000, 100_000))
    example_names = _names(rng, VT_EXAMPLE_LETTERS)

    def example(num_units: int) -> str:
        context = _context(example_names, VT_EXAMPLE_VALUE, num_units, rng_of(seed, "example"))
        draft = _draft(context, example_names, VT_EXAMPLE_VALUE)
        return f"{draft.input}{draft.answer_prefix} {' '.join(example_names)}\n\n\n\n"

    room = min(VT_EXAMPLE_TOKENS - VT.answer_tokens, context_len // _EXAMPLE_SHARE)
    solved, num_units = example(1), 2
    while len(encode(longer := example(num_units))) <= room:
        solved, num_units = longer, num_units + 1

    def build(num_units: int) -> Draft:
        context = _context(names, value, num_units, rng_of(seed, "places"))
        draft = _draft(context, names, value)
        return Draft(solved + draft.input, draft.answer_prefix, draft.outputs)

    return Maker(build, VT.answer_tokens, least=1)


def _names(rng: random.Random, num_letters: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < VT_HOPS + 1:
        found["".join(rng.choices(string.ascii_uppercase, k=num_letters))] = None
    return list(found)


def _context(names: list[str], value: str, num_units: int, rng: random.Random) -> str:
    """Return lines of noise with the chain's assignments between them, in order.

    If the lines are fewer than the assignments, these are placed between sentences.
    """
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    units = [f"{NOISE}\n"] * num_units
    if num_units <= len(chain):
        units = [f"{each}." for each in NOISE.removesuffix(".").split(". ")] * num_units
    places = sorted(rng.sample(range(len(units)), len(chain)))
    for number, (place, line) in enumerate(zip(places, chain, strict=True)):
        units.insert(place + number, line)
    return " ".join(units)


def _draft(context: str, names: list[str], value: str) -> Draft:
    return Draft(
        VT.question.format(context=context, query=value),
        VT.answer_prefix.format(num_v=len(names), query=value),
        tuple(names),
    )
