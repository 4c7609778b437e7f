"""Samples, and how many units of haystack fill a context."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.studies.ruler.templates import FULL_LEN

_MARGIN = 8  # a guess drops this part of the range or more
_SPARE_TOKENS = 8  # of an answer below FULL_LEN, beside the expected text

Encode = Callable[[str], Sequence[int]]  # without special tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """A sample's text with some number of units."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]  # the references


@dataclass(frozen=True, slots=True)
class Maker:
    """Builds one sample of a task with any number of units."""

    build: Callable[[int], Draft]
    answer_tokens: int  # of RULER
    least: int  # units
    most: int | None = None  # units; None: there are always more
    needs_all: bool = True  # an answer has every reference; otherwise any of them is enough


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a task. Prompt and answer together fit the context."""

    task: str
    index: int
    draft: Draft
    prompt_ids: tuple[int, ...]
    max_tokens: int
    num_units: int
    # Tokens of the text before the first reference, without special tokens; None: RULER's files
    # of this task do not have it.
    token_position_answer: int | None = None

    @property
    def length(self) -> int:
        """Return the tokens of prompt and answer, RULER's `length`."""
        return len(self.prompt_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class SampleScore:
    """The score of one sample's answer."""

    index: int
    share: float  # by the task's metric, 0 to 1
    pred: str


class MisfitError(Exception):
    """A context that no number of units fits."""

    def __init__(self, *, least_len: int | None = None) -> None:
        """Keep the shortest context in tokens that works, or None if the haystack ends first."""
        super().__init__()
        self.least_len = least_len


def rng_of(*parts: object) -> random.Random:
    """Return a generator of random numbers for these parts, equal in every process."""
    return random.Random("/".join(map(str, parts)))  # noqa: S311  # test data, no secret


def fit(
    task: str,
    index: int,
    maker: Maker,
    context_len: int,
    *,
    encode: Encode,
    special_ids: tuple[int, ...],
) -> Sample:
    """Return the sample with the most units that fit `context_len` tokens. Raises MisfitError."""

    def sample(num_units: int) -> Sample:
        draft = maker.build(num_units)
        ids = (*special_ids, *encode(draft.input + draft.answer_prefix))
        budget = _answer_tokens(draft, maker, context_len, encode)
        return Sample(task, index, draft, ids, budget, num_units)

    # `best` fits, and `upper` units are too many or unlimited.
    best, upper, excess = sample(maker.least), None, 0
    if best.length > context_len:
        raise MisfitError(least_len=best.length)
    while upper is None or upper - best.num_units > 1:
        found = sample(_guess(best, context_len, upper, excess, maker.most))
        if found.length > context_len:
            upper, excess = found.num_units, found.length - context_len
        elif found.num_units == maker.most and found.length < context_len:
            raise MisfitError
        else:
            best = found
            if best.num_units == maker.most:
                break
    return best


def _guess(best: Sample, context_len: int, upper: int | None, excess: int, most: int | None) -> int:
    """Return the next number of units to try.

    Lengths are nearly linear in units. Each guess is a line's, kept off both ends, so that few
    texts are tokenised and every guess is new.
    """
    if upper is None:
        grown = 2 * best.num_units
        return grown if most is None else min(grown, most)
    spare, span = context_len - best.length, upper - best.num_units
    margin = max(1, span // _MARGIN)
    step = span * spare // (spare + excess)
    return best.num_units + min(max(step, margin), span - margin)


def _answer_tokens(draft: Draft, maker: Maker, context_len: int, encode: Encode) -> int:
    """Return the answer's budget: RULER's from FULL_LEN on, and below what the answer needs."""
    if context_len >= FULL_LEN:
        return maker.answer_tokens
    answers = [", ".join(draft.outputs)] if maker.needs_all else draft.outputs
    return max(len(encode(f" {each}")) for each in answers) + _SPARE_TOKENS
