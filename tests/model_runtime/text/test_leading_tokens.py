"""A text that begins with the token that a tokenizer adds in front of every text."""

from collections.abc import Sequence

import pytest
from tokenizers.processors import TemplateProcessing

from ropewalk.model_runtime.text.tokenizer import Tokenizer
from tests.doubles.tokens import byte_tokenizer_fast


def tokenizer_of(before: Sequence[str], after: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of bytes that adds special tokens around every text."""
    fast = byte_tokenizer_fast()
    names = ["<s>", "<sop>", "</s>"]
    fast.add_special_tokens({"additional_special_tokens": names})
    special = [(name, fast.convert_tokens_to_ids(name)) for name in names]
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=special
    )
    return Tokenizer(fast)


@pytest.mark.parametrize(("before", "after"), [(["<s>"], []), (["<s>", "<sop>"], ["</s>"])])
def test_tokens_that_a_text_has_already_are_not_added_again(
    before: list[str], after: list[str]
) -> None:
    """The ids are those of the text without them; a text with two of them keeps two."""
    tokenizer = tokenizer_of(before, after)
    begin = "".join(before)
    plain = tokenizer.encode("ab")
    assert tuple(plain[: len(before)]) == tokenizer.leading_special_ids()
    assert tokenizer.encode(f"{begin}ab") == plain
    assert tokenizer.encode(f"{begin}{begin}ab") == [*tokenizer.leading_special_ids(), *plain]
    assert tokenizer.encode(begin) == tokenizer.encode("")
    bare = tokenizer.encode(f"{begin}ab", add_special_tokens=False)
    assert bare + tokenizer.encode(begin)[len(before) :] == plain


def test_a_tokenizer_that_adds_nothing_takes_nothing_away() -> None:
    """Two tokens at the start of a text are the client's."""
    tokenizer = tokenizer_of([])
    assert len(tokenizer.encode("<s><s>a")) == 3


def test_a_part_of_the_tokens_is_no_whole() -> None:
    """Only a text with all of them begins as the tokenizer's own."""
    tokenizer = tokenizer_of(["<s>", "<sop>"])
    assert len(tokenizer.encode("<s>a")) == 4
