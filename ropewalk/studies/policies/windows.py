"""Inputs of the tier-change comparison: windows of text with needles before the tier changes.

A window has these parts in order:

    | prompt, L - lead tokens, needles inside | text over all changes | scored text | question |

The prompt is prefilled, and the rest is fed one token at a time. The scored tokens are the same for
one tier change and for three, because the text before them grows backwards.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.held_out import Document
from ropewalk.server.corpus.needles import FORMS, Needle, random_needles
from ropewalk.studies.harness.eval_run import EvalError

NUM_NEEDLES = 2  # one is the question; the other prevents an answer with just any number
_DEPTHS = (0.25, 0.75)  # of the prompt; the question alternates between them


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of a window's parts, in tokens."""

    native_len: int  # L, the position of the first tier change
    num_crossings: int
    lead_tokens: int = 16  # decoded before the first tier change
    scored_tokens: int = 64  # decoded after the last one

    @property
    def prompt_len(self) -> int:
        """Return the number of tokens that are prefilled."""
        return self.native_len - self.lead_tokens

    @property
    def last_ceiling(self) -> int:
        """Return the length at which the last tier change happens."""
        return self.native_len << (self.num_crossings - 1)

    @property
    def first_scored(self) -> int:
        """Return the index of the first scored token, the first predicted under the last table.

        The token at index `last_ceiling` takes the sequence over the ceiling. It is predicted
        before the tier change, and computed after it.
        """
        return self.last_ceiling + 1

    @property
    def question_at(self) -> int:
        """Return the index of the question's first token."""
        return self.first_scored + self.scored_tokens

    @property
    def final_ceiling(self) -> int:
        """Return the end of the last tier."""
        return 2 * self.last_ceiling


@dataclass(frozen=True, slots=True)
class CrossingWindow:
    """One sequence to feed."""

    shape: Shape
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]  # fed one at a time; the last ones are the question
    needle: Needle  # the one in the question
    num_answer_tokens: int  # generated after the question

    @property
    def scored(self) -> slice:
        """Return the slice of scored tokens among the forced ones."""
        first = self.shape.first_scored - self.shape.prompt_len
        return slice(first, first + self.shape.scored_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.forced_ids) + self.num_answer_tokens


@dataclass(frozen=True, slots=True)
class CrossingSource:
    """The text of one window, before it is cut for a number of tier changes."""

    text_ids: tuple[int, ...]
    needles: tuple[Needle, ...]
    asked: int  # index of the needle in the question


def draw_sources(
    tokenizer: Tokenizer, documents: Iterable[Document], longest: Shape, count: int, seed: int
) -> list[CrossingSource]:
    """Draw `count` pieces that do not overlap, each long enough for `longest`.

    The documents are in an order shuffled by the seed. Raises EvalError.
    """
    rng = random.Random(seed)  # noqa: S311  # a choice of text, no secret
    shuffled = list(documents)
    rng.shuffle(shuffled)
    length = longest.question_at
    sources: list[CrossingSource] = []
    left: list[int] = []
    for document in shuffled:
        left += tokenizer.encode(document.text, add_special_tokens=False)
        while len(left) >= length and len(sources) < count:
            number = len(sources)
            needles = random_needles(rng, NUM_NEEDLES, FORMS[number // NUM_NEEDLES % len(FORMS)])
            sources.append(
                CrossingSource(tuple(left[:length]), tuple(needles), number % NUM_NEEDLES)
            )
            left = left[length:]
    if len(sources) < count:
        raise EvalError(
            f"--windows: the text has {len(sources)} of {length} tokens each, fewer than the "
            f"{count} asked for"
        )
    return sources


def lay_out(tokenizer: Tokenizer, source: CrossingSource, shape: Shape) -> CrossingWindow:
    """Build the window for one number of tier changes. Raises EvalError if L is too short."""
    specials = tokenizer.leading_special_ids()
    definitions = [_ids(tokenizer, each.definition) for each in source.needles]
    num_text = shape.prompt_len - len(specials) - sum(map(len, definitions))
    if num_text < sum(map(len, definitions)):
        raise EvalError(
            f"--native-len: {shape.native_len} tokens leave no room for text beside the needles"
        )
    num_forced = shape.question_at - shape.prompt_len
    text = source.text_ids[len(source.text_ids) - num_text - num_forced :]
    prompt = [*specials, *_with_needles(tokenizer, text[:num_text], definitions)]
    needle = source.needles[source.asked]
    question = _ids(tokenizer, "\n" + needle.question)
    answer = _ids(tokenizer, needle.value + needle.form.after)
    window = CrossingWindow(
        shape, tuple(prompt), (*text[num_text:], *question), needle, num_answer_tokens=len(answer)
    )
    if window.num_tokens > shape.final_ceiling:
        raise EvalError(
            f"--scored-tokens: {shape.scored_tokens} with question and answer must end within the "
            f"last tier of {shape.final_ceiling} tokens, got {window.num_tokens}"
        )
    return window


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _with_needles(
    tokenizer: Tokenizer, text: Sequence[int], definitions: Sequence[Sequence[int]]
) -> list[int]:
    """Insert the definitions at line ends near their depths, or in a line if no line ends."""
    ends = [at for at, token in enumerate(text, 1) if tokenizer.decode([token]).endswith("\n")]
    mixed = list(text)
    for depth, ids in reversed(list(zip(_DEPTHS, definitions, strict=True))):
        wanted = int(depth * len(text))
        at = min(ends, key=lambda end, wanted=wanted: abs(end - wanted), default=wanted)  # type: ignore[misc]
        mixed[at:at] = ids
    return mixed
