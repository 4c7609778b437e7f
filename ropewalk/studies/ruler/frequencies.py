"""Frequent words: `cwe` and `fwe` (RULER's common_ and freq_words_extraction.py)."""

import math
import random
import string
from collections.abc import Sequence

from ropewalk.studies.ruler.sample import Draft, Maker, rng_of
from ropewalk.studies.ruler.templates import (
    CWE,
    CWE_COMMON,
    CWE_EXAMPLE_REPEATS,
    CWE_EXAMPLE_WORDS,
    CWE_REPEATS,
    FULL_LEN,
    FWE,
    FWE_ALPHA,
    FWE_ANSWERS,
    FWE_LETTERS,
    FWE_NOISE,
    FWE_TOKENS_A_WORD,
    Repeats,
)
from ropewalk.studies.ruler.words import ADJECTIVES, NOUNS

_ZETA_2 = math.pi**2 / 6  # the sum of all Zipf weights for FWE_ALPHA


def cwe_maker(context_len: int, seed: object) -> Maker:
    """Return the maker of one sample, whose units are different words of the list.

    The prompt begins with a solved example. If a long context needs more words than there are,
    the others are an adjective and a noun (`amber-tower`).
    """
    row = int(context_len >= FULL_LEN)
    rng = rng_of(seed, "words")
    num_example = CWE_EXAMPLE_WORDS[row]
    single = rng.sample([*ADJECTIVES, *NOUNS], len(ADJECTIVES) + len(NOUNS))
    # The common words come first, so that they are the same at every length.
    example = single[CWE_COMMON : CWE_COMMON + num_example]
    single = single[:CWE_COMMON] + single[CWE_COMMON + num_example :]
    listed = _numbered(_repeated(example, CWE_EXAMPLE_REPEATS[row], rng))
    # RULER has no space between the colon and the example's answer.
    solved = (
        f"{CWE.question.format(context=listed)}{CWE.answer_prefix}"
        f"{_numbered(example[:CWE_COMMON])}\n"
    )
    most = len(single) + len(ADJECTIVES) * len(NOUNS)

    def build(num_units: int) -> Draft:
        order = rng_of(seed, "order")
        words = single[:num_units]
        if num_units > len(single):
            pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
            words = [*words, *order.sample(pairs, num_units - len(single))]
        listed = _numbered(_repeated(words, CWE_REPEATS[row], order))
        question = CWE.question.format(context=listed)
        return Draft(solved + question, CWE.answer_prefix, tuple(words[:CWE_COMMON]))

    return Maker(build, CWE.answer_tokens, least=CWE_COMMON + 1, most=most)


def fwe_maker(context_len: int, seed: object) -> Maker:
    """Return the maker of one sample, whose units are words drawn by Zipf's law.

    A word of rank k is shown floor(n k**-alpha / zeta(alpha)) times, of n units.
    """
    rng = rng_of(seed, "vocabulary")
    size = max(FWE_ANSWERS + 1, context_len // FWE_TOKENS_A_WORD)
    found: dict[str, None] = {}
    while len(found) < size:
        found["".join(rng.choices(string.ascii_lowercase, k=FWE_LETTERS))] = None
    vocabulary = [FWE_NOISE, *list(found)[1:]]
    answers = tuple(vocabulary[1 : FWE_ANSWERS + 1])

    def build(num_units: int) -> Draft:
        counts = zipf_counts(num_units, size)
        while size > len(answers) + 1 and counts[len(answers)] == counts[len(answers) + 1]:
            # The answer's last word would be as frequent as the next one.
            num_units -= 1
            counts = zipf_counts(num_units, size)
        shown = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        rng_of(seed, "order").shuffle(shown)
        return Draft(FWE.question.format(context=" ".join(shown)), FWE.answer_prefix, answers)

    # The fewest units of which the answer's last word is shown.
    least = math.ceil((FWE_ANSWERS + 1) ** FWE_ALPHA * _ZETA_2)
    return Maker(build, FWE.answer_tokens, least=least)


def zipf_counts(num_words: int, size: int) -> list[int]:
    """Return how often each rank of the vocabulary is shown, the most frequent first."""
    return [int(num_words * rank**-FWE_ALPHA / _ZETA_2) for rank in range(1, size + 1)]


def _repeated(words: Sequence[str], repeats: Repeats, rng: random.Random) -> list[str]:
    """Return the words in random order; the first CWE_COMMON are the common ones."""
    listed = [*words[:CWE_COMMON]] * repeats.common + [*words[CWE_COMMON:]] * repeats.others
    rng.shuffle(listed)
    return listed


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
