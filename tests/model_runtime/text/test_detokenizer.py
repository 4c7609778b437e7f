"""Text grows by whole characters and ends before a stop string."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from ropewalk.model_runtime.text.detokenizer import Detokenizer
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from tests.doubles.tokens import byte_tokenizer, byte_tokenizer_fast

TOKENIZER = byte_tokenizer()
# Without U+FFFD itself: at the end of an answer the library takes it for an incomplete character.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20)


def pieces(text: str, stop: tuple[str, ...] = (), prompt: str = "") -> tuple[list[str], bool]:
    """The pieces that are sent for a text that arrives byte by byte."""
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER, tuple(TOKENIZER.encode(prompt)), stop)
    sent = []
    for token_id in ids:
        sent.append(detokenizer.push(token_id))
        if detokenizer.is_stopped:
            return sent, True
    return [*sent, detokenizer.flush()], False


@given(TEXT, TEXT)
def test_pieces_join_to_the_text(text: str, prompt: str) -> None:
    """The pieces join to the text for any characters after any prompt."""
    sent, stopped = pieces(text, prompt=prompt)
    assert "".join(sent) == text
    assert not stopped
    assert not any("\ufffd" in piece for piece in sent)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=9))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """No part of a stop string is sent before it is complete."""
    sent, stopped = pieces(text, tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert ("".join(sent), stopped) == (text, False)
        return
    # The stop string that completes first ends the text; of several, the one that began first.
    complete = [stop for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
    begin = min(ends) - max(len(stop) for stop in complete)
    assert ("".join(sent), stopped) == (text[:begin], True)


def test_bytes_that_can_never_be_a_character_do_not_end_the_text() -> None:
    """Under byte fallback, the stream of the tokenizers library would give up."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256, "y": 257}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    for prompt in ((), (0x0A, 0xE2, 256)):
        detokenizer = Detokenizer(tokenizer, prompt, ())
        text = "".join(detokenizer.push(each) for each in (0x0A, 0xE2, 256, 257, 0xC3, 0xA9, 256))
        assert text.endswith("y\u00e9x")


def test_prompts_are_neither_cut_nor_filled_up() -> None:
    """A tokenizer.json may carry truncation and padding from training."""
    fast = byte_tokenizer_fast()
    fast.backend_tokenizer.enable_truncation(8)
    fast.backend_tokenizer.enable_padding(length=32)
    assert len(Tokenizer(fast).encode("twenty characters ok")) == 20


def test_token_text_is_openais() -> None:
    """A part of a character is written as its bytes."""
    first, second = TOKENIZER.encode("é")
    assert TOKENIZER.token_text(first) == "bytes:\\xc3"
    assert TOKENIZER.token_text(second) == "bytes:\\xa9"
    assert TOKENIZER.token_text(TOKENIZER.encode(" ")[0]) == " "
    assert TOKENIZER.token_text(100_000) == ""
