"""A long text is tokenised whole or refused, and other threads go on meanwhile."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.held_out import library_documents

LONG = "".join(each.text for each in library_documents(held_out=True))[:1_000_000]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(EMBEDDED_MODEL))


def longest_pause(call: Callable[[], Any]) -> tuple[float, float]:
    """The longest time in seconds in which this thread could not run during a call, and all."""
    thread = threading.Thread(target=call)
    start = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return longest, last - start


def test_a_long_text_leaves_the_interpreter_to_other_threads(tokenizer: Tokenizer) -> None:
    """Both ways; one call of the library would keep it for the whole time."""
    ids = tokenizer.encode(LONG)
    for call in (lambda: tokenizer.encode_at_most(LONG, 2**20), lambda: tokenizer.decode(ids * 4)):
        pause, whole = longest_pause(call)
        assert pause < whole / 2, (pause, whole)


@pytest.mark.parametrize("text", ["", "a", LONG[:5000], "\u6587\u5b57 \U0001f600" * 50, "1" * 999])
@pytest.mark.parametrize("adds", [True, False])
def test_the_tokens_are_those_of_transformers(
    tokenizer: Tokenizer, text: str, *, adds: bool
) -> None:
    """The library's call for a batch computes no offsets, which nothing needs."""
    plain = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    expected = plain(text, add_special_tokens=adds)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=adds) == expected
    assert tokenizer.encode_at_most(text, 2**20, add_special_tokens=adds) == tuple(expected)
    assert tokenizer.decode(expected) == plain.decode(expected, skip_special_tokens=True)


def test_a_text_of_too_many_tokens_is_known_by_its_beginning(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the tokens of the rest; one that fits exactly is taken."""
    text = LONG[:100_000]
    num = len(tokenizer.encode(text))
    assert len(tokenizer.encode_at_most(text, num) or ()) == num
    assert tokenizer.encode_at_most(text, num - 1) is None
    sizes = []
    encoding = tokenizer._encoding

    def counted(part: str, *rest: Any, **named: Any) -> Any:
        sizes.append(len(part))
        return encoding(part, *rest, **named)

    monkeypatch.setattr(tokenizer, "_encoding", counted)
    assert tokenizer.encode_at_most(text, 100) is None
    assert sizes == [200, 800]


def test_a_pattern_that_backtracks_refuses_its_text_only() -> None:
    """The library panics, which is no Exception; the error names the field."""
    plain = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    plain.backend_tokenizer.pre_tokenizer = Split(Regex(r"(a|aa)+$"), "isolated")
    tokenizer = Tokenizer(plain)
    with pytest.raises(RequestError, match=r"`prompt` cannot be tokenised: .*retry-limit") as found:
        tokenizer.encode("a" * 40 + "b")
    assert found.value.param == "prompt"
    assert tokenizer.encode("aaa")


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    """The error names the field."""
    with pytest.raises(RequestError, match="`prompt` is not valid Unicode text"):
        tokenizer.encode("a\ud800")
