"""Needles: a key with a random value, hidden in a long text and requested at its end.

FORMS are lines as in source files. The embedded model is trained on all of them. Other models
complete them because the answer is in the text (the passkey task of
Mohtashami and Jaggi, arXiv 2305.16300, and key-value retrieval). SENTENCE is plain English, for
texts in English and models that read it.
"""

import random
from dataclasses import dataclass, field

_NAMES = ("KEY", "NAME", "TOKEN", "CODE", "PORT", "SEED", "LIMIT", "FLAG", "INDEX", "STATE")
_ADJECTIVES = (
    "amber",
    "broken",
    "distant",
    "eastern",
    "frozen",
    "hidden",
    "narrow",
    "old",
    "quiet",
)
_NOUNS = (
    "bridge",
    "castle",
    "garden",
    "harbour",
    "library",
    "lighthouse",
    "mill",
    "orchard",
    "tower",
)
VALUE_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Form:
    """The definition of a key and the question for it; `{k}` is the key, `{v}` the value."""

    name: str
    definition: str  # a whole line
    question: str  # a line up to the value
    after: str  # the text after the value in that line
    in_words: bool = False  # keys are `amber tower` instead of PORT_4821
    # In a chat. Not in the repr, by which the record of a study knows its requests.
    asked: str = field(default="What is the value of {k}? Answer with the number.", repr=False)

    def define(self, key: str, value: str) -> str:
        return self.definition.format(k=key, v=value)

    def ask(self, key: str) -> str:
        return self.question.format(k=key)


FORMS = (
    Form("print", "{k} = {v}\n", "print({k})  # -> ", "\n"),
    Form("assign", "{k} = {v}\n", "{k} = ", "\n"),
    Form("assert", "{k} = {v}\n", "assert {k} == ", "\n"),
    Form("passkey", "# The pass key of {k} is {v}\n", "# The pass key of {k} is ", "\n"),
)
SENTENCE = Form(
    "sentence",
    "The secret number of the {k} is {v}.\n",
    "The secret number of the {k} is ",
    ".\n",
    in_words=True,
    asked="What is the secret number of the {k}? Answer with the number.",
)


@dataclass(frozen=True, slots=True)
class Needle:
    """One key and its value, in one form."""

    form: Form
    key: str
    value: str

    @property
    def definition(self) -> str:
        return self.form.define(self.key, self.value)

    @property
    def question(self) -> str:
        return self.form.ask(self.key)

    @property
    def asked(self) -> str:
        return self.form.asked.format(k=self.key)


def random_key(rng: random.Random) -> str:
    """Return a random key, for example PORT_4821."""
    return f"{rng.choice(_NAMES)}_{rng.randrange(1000, 10_000)}"


def _random_place(rng: random.Random) -> str:
    return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"


def random_value(rng: random.Random) -> str:
    """Return five random digits, the first not 0."""
    return str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))


def random_needles(rng: random.Random, count: int, form: Form) -> list[Needle]:
    """Return `count` needles of one form with different keys."""
    key_of = _random_place if form.in_words else random_key
    values: dict[str, str] = {}
    while len(values) < count:
        values[key_of(rng)] = random_value(rng)
    return [Needle(form, key, value) for key, value in values.items()]
