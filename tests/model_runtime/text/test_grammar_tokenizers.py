"""The grammar and the detokenizer read a vocabulary alike, sentencepiece's alphabet included."""

import json
import random

import jsonschema_rs
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a b": {"type": "string", "maxLength": 6}, "c": {"enum": ["x y", " é"]}},
    "required": ["a b", "c"],
    "additionalProperties": False,
}


NUM_TOKENS = 360  # of the tokenizers below


def sentencepiece_like(kind: str = "BPE") -> Tokenizer:
    """A tokenizer like Llama's: bytes as <0xNN>, spaces as U+2581, the first one stripped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    names += [*map(chr, range(33, 127)), "\u2581a", "\u2581{", '{"', '":', '\u2581"', "é"]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    if kind == "BPE":
        merges = [("{", '"'), ('"', ":"), ("\u2581", "{"), ("\u2581", '"')]
        model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")  # noqa: S106  # no password
    else:
        pieces = [(name, -1.0 - len(name) / 10) for name in vocabulary]
        model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))  # noqa: S106


def test_bytes_and_word_marks_are_read_alike() -> None:
    """Random tokens from the allowed ones make text that satisfies the schema."""
    check_random_answers(sentencepiece_like())


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
@pytest.mark.parametrize("num_rows", [NUM_TOKENS + 9, NUM_TOKENS - 3, NUM_TOKENS - 5])
def test_tokens_without_a_row_are_never_allowed(kind: str, num_rows: int) -> None:
    """Most of the last six tokens have merges; texts are spelt with other tokens."""
    tokenizer = sentencepiece_like(kind)
    assert tokenizer.as_json()[1] == NUM_TOKENS
    check_random_answers(tokenizer, num_rows)


def check_random_answers(tokenizer: Tokenizer, num_rows: int | None = None) -> None:
    """Draw tokens from the allowed ones; all texts satisfy the schema."""
    compiler = GrammarCompiler(tokenizer, num_rows=num_rows)
    grammar = compiler.compile(compiler.text_of(SCHEMA)).result()
    for seed in range(20):
        draw = random.Random(seed)
        constraint, stream, text = grammar.begin(frozenset({2})), tokenizer.stream(), ""
        for token_id in tokenizer.encode("hello"):
            stream.push(token_id)
        is_complete = False
        while not is_complete and constraint.look():
            allowed = int.from_bytes(constraint.allowed, "little")
            token_id = draw.choice([at for at in range(400) if allowed >> at & 1])
            assert num_rows is None or max(token_id, *constraint.forced(), 0) < num_rows
            text += stream.push(token_id)
            is_complete = constraint.advance(token_id)
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text


def test_a_draft_with_an_unknown_token_leaves_the_grammar_as_it_is() -> None:
    """A model may have more rows than its tokenizer has tokens, and a prompt may name them."""
    tokenizer = sentencepiece_like()
    compiler = GrammarCompiler(tokenizer)
    constraint = compiler.compile(compiler.text_of(SCHEMA)).result().begin(frozenset({2}))
    assert constraint.look()
    allowed = int.from_bytes(constraint.allowed, "little")
    brace = next(at for at in range(400) if allowed >> at & 1)
    assert constraint.num_allowed([brace, 100_000, brace]) == 1
    assert constraint.num_allowed([100_000]) == 0
    assert constraint.look()
    assert not constraint.advance(brace)
