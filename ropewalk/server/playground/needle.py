"""GET /playground/needle: a long prompt with a hidden value, and the value.

The text is the held-out part of the standard library of the running Python, as in `ropewalk eval`.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.api.strict_body import Body
from ropewalk.server.corpus.haystack import Haystack, HaystackError
from ropewalk.server.corpus.held_out import Document, library_documents
from ropewalk.server.corpus.needles import FORMS, random_needles

SHORTEST = 64  # tokens: a needle, its question and some text
_CHARACTERS_A_TOKEN = 12  # above the real number, so that the text is long enough


class NeedleAnswer(Body):
    """A prompt, and the text that a model answers if it finds the needle."""

    prompt: str = Field(examples=["import os"])
    """The text with the hidden value, and a question for it at the end."""
    expected: str = Field(examples=["48213"])
    """The text that a model answers if it finds the value."""
    context_len: int = Field(examples=[512])
    """Tokens of the prompt and of the room for the answer."""
    num_prompt_tokens: int = Field(examples=[500])
    """Tokens of the prompt."""
    max_tokens: int = Field(examples=[12])
    """Tokens of the room for the answer."""
    depth: float = Field(examples=[0.1])
    """Share of the text before the value."""
    source: str = Field(examples=["json/decoder.py"])
    """The file of the standard library that the text ends in."""


@dataclass(frozen=True, slots=True)
class NeedleMaker:
    """A maker of prompts for one tokenizer and one longest context."""

    tokenizer: Tokenizer
    longest: int  # tokens

    def make(self, context_len: int, depth: float, seed: int) -> NeedleAnswer:
        """Return a prompt of exactly the wanted length. The same arguments give the same prompt.

        Raises RequestError if the length is out of bounds.
        """
        if not SHORTEST <= context_len <= self.longest:
            raise RequestError(
                f"`context_len` must be {SHORTEST} to {self.longest} tokens. Given: {context_len}",
                param="context_len",
            )
        rng = random.Random(seed)  # noqa: S311  # a choice of text, no secret
        needle = random_needles(rng, 1, FORMS[0])[0]
        source, lines = _cut(rng, context_len)
        encode = self.tokenizer.encode
        lens = tuple(len(encode(line, add_special_tokens=False)) for line in lines)
        try:
            haystack = Haystack(source, lines, lens, (needle,), (depth,))
            query = haystack.queries(context_len, self.tokenizer)[0]
        except HaystackError as error:
            raise RequestError(
                f"`context_len`: no text for {context_len} tokens at depth {depth:g}",
                param="context_len",
            ) from error
        num_special = len(self.tokenizer.leading_special_ids())
        text = self.tokenizer.decode(
            list(query.prompt_ids[num_special:]), skip_special_tokens=False
        ).lstrip("\ufffd")  # the cut may be inside a character
        # The text is tokenised again when it is sent. Its first characters may then merge anew.
        num_prompt_tokens = len(encode(text))
        return NeedleAnswer(
            prompt=text,
            expected=needle.value,
            context_len=context_len,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max(1, context_len - num_prompt_tokens),
            depth=query.depth,
            source=source,
        )


@lru_cache(maxsize=1)
def _documents() -> list[Document]:
    return library_documents(held_out=True)


def _cut(rng: random.Random, context_len: int) -> tuple[str, tuple[str, ...]]:
    """Return enough lines for a context up to the end of a random document, and its name."""
    documents = _documents()
    last = rng.randrange(len(documents))
    wanted = _CHARACTERS_A_TOKEN * context_len
    text = ""
    for back in range(len(documents)):
        text = documents[last - back].text.removesuffix("\n") + "\n" + text
        if len(text) >= wanted:
            break
    return documents[last].name, tuple(text[-wanted:].splitlines(keepends=True))
