"""The models to measure with have their stated sizes and answers that are worth timing."""

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.make_model import Shape, build
from training.tokenizer import EOS_ID, train_tokenizer

TINY = Shape(hidden=128, layers=6, heads=2, kv_heads=1, intermediate=256, vocab=400)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """400 tokens, more than half of them single bytes."""
    return train_tokenizer(["def speak(self):\n    return 'straße'\n"] * 9, TINY.vocab)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> torch.nn.Module:
    """A model of that shape."""
    return build(TINY, tokenizer)


@torch.no_grad()
def test_logits_are_neither_flat_nor_wild(tiny: torch.nn.Module) -> None:
    """The spread is bounded at every position from the fifth on."""
    ids = torch.randint(4, TINY.vocab, (1, 200))
    logits_TV = tiny(ids).logits[0]
    assert logits_TV.isfinite().all()
    spread_T = logits_TV[:, 4:].std(dim=-1)
    assert spread_T.min() > 0.5
    assert spread_T.max() < 5
    assert logits_TV.argmax(dim=-1).unique().numel() > 50


@torch.no_grad()
def test_greedy_answers_have_whole_characters_only(
    tiny: torch.nn.Module, tokenizer: Tokenizer
) -> None:
    """A server would hold back part of a character, and an end token would end the text."""
    ids = torch.randint(4, TINY.vocab, (1, 500))
    chosen = tiny(ids).logits[0].argmax(dim=-1).tolist()
    assert EOS_ID not in chosen
    texts = [tokenizer.decode([token]) for token in chosen]
    assert all(text and "\N{REPLACEMENT CHARACTER}" not in text for text in texts)
