"""Contexts for retrieval: text with needles in it, and one question for each needle.

A text is cut and joined as text and tokenised whole, like a user's text. Tokens beyond the
requested length are cut off at the front, so that every length is met exactly.
"""

import bisect
import itertools
from dataclasses import dataclass, field

from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.needles import Needle

ANSWER_TOKENS = 6  # five digits take max five tokens, and a tokenizer may begin with a space
CHAT_ANSWER_TOKENS = 32  # a sentence with them
LINES_A_TOKEN = 2  # above the real max, because only empty lines have no token


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The text of a chat template before a user's message, and after it."""

    before: str
    after: str


class HaystackError(Exception):
    """A context that the text cannot fill, or that its needles do not fit."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question about one context."""

    prompt_ids: tuple[int, ...]
    max_tokens: int  # with the prompt exactly the context's length
    needle: Needle
    depth: float  # of the needle: the share of the text before it
    position: int  # of its first token
    in_chat: bool = field(default=False, repr=False)

    def is_answered_by(self, text: str) -> bool:
        """Return whether an answer begins with the needle's value, or in a chat has it."""
        if self.in_chat:
            return self.needle.value in text
        return text.lstrip(" ").startswith(self.needle.value)


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text with the same end and needles at every length; longer contexts begin earlier."""

    source: str  # the name of the text
    lines: tuple[str, ...]  # up to the position of the question
    line_lens: tuple[int, ...]  # of each, in tokens, if tokenised alone
    needles: tuple[Needle, ...]
    depths: tuple[float, ...]  # wanted, ascending, one per needle

    def queries(
        self, context_len: int, tokenizer: Tokenizer, chat: ChatFrame | None = None
    ) -> list[Query]:
        """Build one query per needle over a shared text. Raises HaystackError.

        `chat`: text and question are a user's message. None: the text goes on with a question.
        """

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False, param="--text")

        first_ids = tuple(tokenizer.leading_special_ids() if chat is None else encode(chat.before))
        num_answer = ANSWER_TOKENS if chat is None else CHAT_ANSWER_TOKENS
        wanted = context_len - num_answer - len(first_ids)

        def question(needle: Needle) -> str:
            return needle.question if chat is None else f"\n{needle.asked}{chat.after}"

        def excess(num_lines: int) -> int:
            text, _ = self._text(num_lines)
            return max(len(encode(text + question(each))) for each in self.needles) - wanted

        most = min(len(self.lines), LINES_A_TOKEN * context_len)
        num_lines = bisect.bisect_left(range(most), 0, lo=1, key=excess)
        if num_lines >= most and excess(num_lines) < 0:
            raise HaystackError(
                f"{self.source} is too short for a context of {context_len} tokens with needles in "
                "it"
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
            raise HaystackError(
                f"a context of {context_len} tokens has no room for {len(self.needles)} needles "
                "and text at line ends"
            )
        queries = []
        for index, needle in enumerate(self.needles):
            ids = (*first_ids, *encode(text + question(needle))[num_cut:])
            before = positions[index] - sum(lens[:index])
            queries.append(
                Query(
                    ids,
                    context_len - len(ids),
                    needle,
                    before / num_filler,
                    positions[index] + len(first_ids),
                    chat is not None,
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
