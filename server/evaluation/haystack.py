"""Contexts for retrieval: text with needles in it, and one question for each needle.

A text is cut and joined as text and tokenised whole, like a user's text. Tokens beyond the
requested length are cut off at the front, so that every length is met exactly.
"""

import bisect
import itertools
import random
from dataclasses import dataclass

from model_runtime.text.tokenizer import Tokenizer
from server.corpus.needles import Needle, random_needles
from server.evaluation.plan import ANSWER_TOKENS, LengthPlan
from server.evaluation.texts import LengthSource, Texts
from server.study.eval_run import EvalError

NEEDLES = 4  # max in a context
_TRIES = 20
_LINES_A_TOKEN = 2  # above the real max, because only empty lines have no token


@dataclass(frozen=True, slots=True)
class Query:
    """One question about one context."""

    prompt_ids: tuple[int, ...]
    max_tokens: int  # with the prompt exactly the context's length
    needle: Needle
    depth: float  # of the needle: the share of the text before it
    position: int  # of its first token


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text with the same end and needles at every length; longer contexts begin earlier."""

    source: LengthSource
    lines: tuple[str, ...]  # up to the position of the question
    line_lens: tuple[int, ...]  # of each, in tokens, if tokenised alone
    needles: tuple[Needle, ...]
    depths: tuple[float, ...]  # wanted, ascending, one per needle

    def queries(self, context_len: int, tokenizer: Tokenizer, texts: Texts) -> list[Query]:
        """Build one query per needle over a shared text. Raises EvalError if it is too short."""
        special_ids = texts.special_ids
        wanted = context_len - ANSWER_TOKENS - len(special_ids)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False, param="--text")

        def excess(num_lines: int) -> int:
            text, _ = self._text(num_lines)
            return max(len(encode(text + each.question)) for each in self.needles) - wanted

        most = min(len(self.lines), _LINES_A_TOKEN * context_len)
        num_lines = bisect.bisect_left(range(most), 0, lo=1, key=excess)
        if num_lines >= most and excess(num_lines) < 0:
            raise EvalError(
                f"--context-lens: {self.source.name} is too short for a context of {context_len} "
                "tokens with needles in it"
            )
        text, starts = self._text(num_lines)
        num_cut = excess(num_lines)
        # Counted up to a character that is not a space, because the tokens of newlines depend on
        # the text after them.
        bodies = [each.definition.rstrip() for each in self.needles]
        lens = [len(encode(f"\n{body}")) - len(encode("\n")) for body in bodies]
        positions = [
            len(encode(text[:at] + body)) - num_cut - num_tokens
            for at, body, num_tokens in zip(starts, bodies, lens, strict=True)
        ]
        lens = [each + 1 for each in lens]  # with the newline
        num_filler = len(encode(text)) - num_cut - sum(lens)
        if positions[0] < 0 or num_filler < len(self.needles):
            raise EvalError(
                f"--context-lens: a context of {context_len} tokens has no room for "
                f"{len(self.needles)} needles and text at line ends"
            )
        queries = []
        for index, needle in enumerate(self.needles):
            ids = (*special_ids, *encode(text + needle.question)[num_cut:])
            before = positions[index] - sum(lens[:index])
            queries.append(
                Query(
                    ids,
                    context_len - len(ids),
                    needle,
                    before / num_filler,
                    positions[index] + len(special_ids),
                )
            )
        return queries

    def _text(self, num_lines: int) -> tuple[str, list[int]]:
        """Return the last lines with needles between them, and the needles' starts in characters.

        The first line comes before every needle, because a part of it is cut off.
        """
        lines = self.lines[len(self.lines) - num_lines :]
        ends = [0, *itertools.accumulate(self.line_lens[len(self.lines) - num_lines :])]
        text = ""
        starts = []
        done = 0
        for needle, depth in zip(self.needles, self.depths, strict=True):
            goal = ends[1] + depth * (ends[-1] - ends[1])
            upper = bisect.bisect_left(ends, goal)
            nearest = min((upper, upper - 1), key=lambda at: (abs(ends[at] - goal), at))
            at = max(done, 1, nearest)
            text += "".join(lines[done:at])
            starts.append(len(text))
            text += needle.definition
            done = at
        return text + "".join(lines[done:]), starts


def choose_haystacks(texts: Texts, plan: LengthPlan, tokenizer: Tokenizer) -> list[Haystack]:
    """Build enough haystacks for `num_queries` questions per length, by the seed.

    Forms and depths alternate.
    """
    rng = random.Random(plan.seed)  # noqa: S311  # a choice of text, no secret
    num_classes = -(-len(plan.depths) // NEEDLES)
    haystacks: list[Haystack] = []
    num_queries = 0
    while num_queries < plan.num_queries:
        number = len(haystacks)
        depths = plan.depths[number % num_classes :: num_classes]
        form = plan.forms[number // num_classes % len(plan.forms)]
        needles = tuple(random_needles(rng, len(depths), form))
        source, lines = _cut(rng, texts, plan.longest, tokenizer)
        line_lens = tuple(len(tokenizer.encode(each, add_special_tokens=False)) for each in lines)
        haystacks.append(Haystack(source, lines, line_lens, needles, depths))
        num_queries += len(depths)
    return haystacks


def _cut(
    rng: random.Random, texts: Texts, longest: int, tokenizer: Tokenizer
) -> tuple[LengthSource, tuple[str, ...]]:
    """Cut lines up to a random line end with enough text before it. Raises EvalError."""
    source = rng.choice(texts.sources)
    lines = [f"{line}\n" for line in source.text.removesuffix("\n").split("\n")]
    if len(lines) <= NEEDLES:
        raise EvalError(
            f"--text: needles are hidden at line ends, and {source.name} has {len(lines)} of them; "
            f"it must have more than {NEEDLES}"
        )
    most = _LINES_A_TOKEN * longest
    for _ in range(_TRIES):
        end = rng.randint(1, len(lines))
        before = "".join(lines[:end])
        if len(tokenizer.encode(before, add_special_tokens=False)) >= longest:
            return source, tuple(lines[:end][-most:])
    return source, tuple(lines[-most:])
