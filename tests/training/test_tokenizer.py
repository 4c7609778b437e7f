"""Any text has tokens and comes back; digits stand alone; chats have their own marks."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training.tokenizer import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID, save_tokenizer


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """Bytes cover all of Unicode."""
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    """A value has five digits and so five tokens."""
    tokens = tokenizer.encode("= 93175\n").ids
    digits = [tokenizer.decode([token]) for token in tokens]
    assert [each for each in digits if each.isdigit()] == list("93175")


def test_a_chat_in_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Transformers renders the saved template."""
    save_tokenizer(tokenizer, tmp_path, 256)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    rendered = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|>s\n<|user|>u<|assistant|>a<|eos|><|user|>v<|assistant|>"
    tokens = saved(rendered, add_special_tokens=False)["input_ids"]
    special = [token for token in tokens if token <= ASSISTANT_ID]
    assert special == [BOS_ID, USER_ID, ASSISTANT_ID, EOS_ID, USER_ID, ASSISTANT_ID]
    assert saved("u")["input_ids"][0] == BOS_ID
