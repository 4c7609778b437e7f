"""Tokenizers built from GGUF, against pieces written down and sentencepiece's rule."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS
from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import (
    FileTokenizer,
    ids_without_token,
    read_tokenizer,
)
from ropewalk.model_runtime.loading.files.gguf_checkpoint import load_gguf_tokenizer
from tests.checkpoints.gguf_files import byte_vocabulary, write_file

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_of(path: Path, metadata: dict[str, Any]) -> FileTokenizer:
    """The tokenizer of a file that holds nothing else."""
    stated = {key: value for key, value in metadata.items() if value is not None}
    architecture = {"general.architecture": "llama"}
    return read_tokenizer(read_gguf(write_file(path, {**architecture, **stated}, {})))


def pieces(backend: Any, text: str) -> list[str]:
    """The pieces of a text before merging, as text."""
    split = backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[first:end] for _, (first, end) in split]


# The pieces that llama.cpp's expressions give.
PIECES = {
    "llama-bpe": ("It's 12345 é2\n\n x", ["It", "'s", " ", "123", "45", " é", "2", "\n\n", " x"]),
    "qwen2": ("It'S 123  end\r\n", ["It", "'S", " ", "1", "2", "3", " ", " end", "\r\n"]),
    "smollm": ("It's 12\n\n x!?", ["It", "'s", " ", "1", "2", "\n\n", " x", "!?"]),
    "gpt-2": ("It's 123  x\n", ["It", "'s", " 123", " ", " x", "\n"]),
    "tekken": ("camelCase ÉCOle 12/\n", ["camel", "Case", " ÉCOle", " ", "1", "2", "/\n"]),
    "gpt-4o": ("camelCase's 1234/\n", ["camel", "Case's", " ", "123", "4", "/\n"]),
    "deepseek-v3": ("(abc 12345 日本 x", ["(abc", " ", "123", "45", " ", "日本", " x"]),
    "seed-coder": ("a12 ;;\n\nb", ["a", "1", "2", " ;;", "\n\n", "b"]),
    "qwen35": ("e\u0301x 12 \u0301", ["e\u0301x", " ", "1", "2", " \u0301"]),
    "glm4": ("It's 1234", ["It", "'s", " ", "123", "4"]),
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_as_the_file_says(name: str, tmp_path: Path) -> None:
    """`tokenizer.ggml.pre` decides, and not the architecture."""
    text, expected = PIECES[name]
    metadata = {**byte_vocabulary(300), "tokenizer.ggml.pre": name}
    assert pieces(tokenizer_of(tmp_path / "t.gguf", metadata).backend, text) == expected


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_split_keeps_every_byte(name: str, tmp_path: Path) -> None:
    """Whatever the pieces are, decoding gives the text."""
    metadata = {**byte_vocabulary(300), "tokenizer.ggml.pre": name}
    backend = tokenizer_of(tmp_path / "t.gguf", metadata).backend
    text = "  It's 12345,\r\n\r\n\tÉcole 日本語 😀 e\u0301 \u00a0x = [1]; ab  "
    ids = backend.encode(text, add_special_tokens=False).ids
    assert backend.decode(ids, skip_special_tokens=False) == text


def test_a_whole_piece_may_be_a_token_without_merges(tmp_path: Path) -> None:
    """Llama 3 takes a piece that is in the vocabulary before any merge."""
    vocabulary = byte_vocabulary(300)
    tokens, types = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    tokens[280], types[280] = "abc", _NORMAL
    for name, expected in (("llama-bpe", [280]), ("qwen2", None)):
        backend = tokenizer_of(
            tmp_path / "t.gguf", {**vocabulary, "tokenizer.ggml.pre": name}
        ).backend
        ids = backend.encode("abc", add_special_tokens=False).ids
        assert ids == (expected or [tokens.index("ab"), tokens.index("c")])


def test_fillers_are_no_tokens(tmp_path: Path) -> None:
    """Rows of the embedding that no token uses cannot be written in a prompt or a grammar."""
    found = tokenizer_of(tmp_path / "t.gguf", byte_vocabulary(300))
    assert found.backend.id_to_token(299) is None
    assert max(found.backend.get_vocab().values()) == 258


@pytest.mark.parametrize(
    ("stated", "before", "after"),
    [
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [1]),
        ({"add_bos_token": None}, [], []),
        ({"add_bos_token": None, "pre": "llama-bpe"}, [0], []),
    ],
)
def test_texts_begin_and_end_as_the_file_says(
    tmp_path: Path, stated: dict[str, Any], before: list[int], after: list[int]
) -> None:
    """Without a word in the file, the split of Llama 3 adds a first token and others do not."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in stated.items()}
    backend = tokenizer_of(tmp_path / "t.gguf", {**byte_vocabulary(300), **changes}).backend
    bare = backend.encode("xy", add_special_tokens=False).ids
    assert backend.encode("xy").ids == [*before, *bare, *after]


def test_end_tokens_are_named_ones_and_control_tokens_of_known_texts(tmp_path: Path) -> None:
    """A plain `</s>`, which Qwen has for HTML, ends nothing."""
    vocabulary = byte_vocabulary(300)
    tokens, types = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    for at, token, kind in (
        (290, "<|im_end|>", _CONTROL),
        (291, "</s>", _NORMAL),
        (292, "<|other|>", _CONTROL),
        (293, "<|stop|>", _CONTROL),
        (294, "<end_of_turn>", _USER_DEFINED),
    ):
        tokens[at], types[at] = token, kind
    vocabulary |= {"tokenizer.ggml.eot_token_id": 293, "tokenizer.chat_template": "{{ 1 }}"}
    found = tokenizer_of(tmp_path / "t.gguf", vocabulary)
    assert found.end_ids == {1, 290, 293, 294}
    assert found.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert found.chat_templates == {"default": "{{ 1 }}"}
    ids = found.backend.encode("a<|other|>b<end_of_turn>", add_special_tokens=False).ids
    assert ids == [tokens.index("a"), 292, tokens.index("b"), 294]
    wrapped, ends = load_gguf_tokenizer(tmp_path / "t.gguf")
    assert ends == found.end_ids
    assert wrapped.decode(ids) == "ab<end_of_turn>"  # the last one is text to its model


def sentencepiece_vocabulary(tokens: dict[str, float], **stated: Any) -> dict[str, Any]:
    """A vocabulary with scores, after the three special tokens and the bytes."""
    first = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0}
    as_bytes = {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(tokens)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*first, *as_bytes, *tokens],
        "tokenizer.ggml.scores": [*first.values(), *as_bytes.values(), *tokens.values()],
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{key}": value for key, value in stated.items()},
    }


def best_pairs_joined(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's rule: join the neighbours with the best score, the leftmost of equals."""
    parts = list(text)
    while True:
        joined = [
            (-scores[first + second], at)
            for at, (first, second) in enumerate(itertools.pairwise(parts))
            if first + second in scores
        ]
        if not joined:
            return parts
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_texts_are_joined_by_score(tmp_path: Path) -> None:
    """Random vocabularies and texts, with a space before the text."""
    generator = random.Random(0)
    for _ in range(5):
        letters = ["a", "b", "c", "\u2581"]
        longer = {
            "".join(generator.choice(letters) for _ in range(generator.randint(2, 5)))
            for _ in range(40)
        }
        scores = dict.fromkeys(letters, 0.0)
        order = [*longer]
        generator.shuffle(order)
        scores |= {token: -1.0 - rank for rank, token in enumerate(sorted(order, key=len))}
        metadata = sentencepiece_vocabulary(scores)
        backend = tokenizer_of(tmp_path / "t.gguf", metadata).backend
        for _ in range(40):
            text = "".join(generator.choice("abc ") for _ in range(generator.randint(1, 30)))
            expected = best_pairs_joined("\u2581" + text.replace(" ", "\u2581"), scores)
            encoding = backend.encode(text, add_special_tokens=False)
            assert encoding.tokens == expected
            assert backend.decode(encoding.ids) == text


def test_sentencepiece_defaults_and_bytes(tmp_path: Path) -> None:
    """A first token and a prefix without a word in the file; unknown letters are bytes."""
    tokens = {"a": 0.0, "\u2581": 0.0, "\u2581a": -1.0, "<|user|>": -1000.0}
    metadata = sentencepiece_vocabulary(tokens)
    metadata["tokenizer.ggml.token_type"][-1] = _USER_DEFINED
    found = tokenizer_of(tmp_path / "t.gguf", metadata)
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    assert found.backend.encode("a").ids == [1, ids["\u2581a"]]
    # A prefix also after a special token, as in llama.cpp.
    assert found.backend.encode("a<|user|>a").ids == [
        *(1, ids["\u2581a"], ids["<|user|>"], ids["\u2581a"])
    ]
    assert found.backend.encode("é", add_special_tokens=False).tokens[1:] == ["<0xC3>", "<0xA9>"]
    assert found.end_ids == {2}
    plain = tokenizer_of(
        tmp_path / "p.gguf", {**metadata, "tokenizer.ggml.add_space_prefix": False}
    )
    assert plain.backend.encode("a", add_special_tokens=False).ids == [ids["a"]]


def test_a_sentencepiece_vocabulary_without_its_unknown_token_is_refused(tmp_path: Path) -> None:
    """The row of the unknown token is a filler that no token uses."""
    metadata = sentencepiece_vocabulary({"a": 0.0})
    metadata["tokenizer.ggml.tokens"][0] = "[PAD0]"
    metadata["tokenizer.ggml.token_type"][0] = _UNUSED
    with pytest.raises(ModelError, match=r"t\.gguf: .*unknown_token_id is 0, and that row has"):
        tokenizer_of(tmp_path / "t.gguf", metadata)


@pytest.mark.parametrize("name", ["Phi 3 Mini", "phi-3-mini", None])
def test_phi_3_strips_spaces_after_special_tokens(tmp_path: Path, name: str | None) -> None:
    """llama.cpp knows it by the model's name, and so does this."""
    tokens = {"a": 0.0, "\u2581": 0.0, "\u2581a": -1.0, "<|user|>": -1000.0}
    metadata = {**sentencepiece_vocabulary(tokens), "general.name": name}
    metadata["tokenizer.ggml.token_type"][-1] = _CONTROL
    backend = tokenizer_of(tmp_path / "t.gguf", metadata).backend
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    got = backend.encode("<|user|>\n a", add_special_tokens=False).ids
    is_stripped = name == "phi-3-mini"
    assert (got == [ids["<|user|>"], ids["\u2581a"]]) == is_stripped


def test_an_id_that_names_no_token_is_left_out(tmp_path: Path) -> None:
    """llama.cpp warns of it, and goes on; converters write -1 for what a vocabulary lacks."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("padding", "seperator", "eot")]
    plain = tokenizer_of(tmp_path / "p.gguf", byte_vocabulary(300))
    metadata = {**byte_vocabulary(300), **dict.fromkeys(keys, 2**32 - 1)}
    found = tokenizer_of(tmp_path / "t.gguf", metadata)
    assert (found.special_tokens, found.end_ids) == (plain.special_tokens, plain.end_ids)
    told = [f"{key} 4294967295" for key in keys]
    assert ids_without_token(read_gguf(tmp_path / "t.gguf")) == told
