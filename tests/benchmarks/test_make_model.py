"""The models to measure with have their stated sizes and answers that are worth timing."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from benchmarks.make_model import SHAPES, Shape, build
from training.tokenizer import EOS_ID, train_tokenizer

TINY = Shape(hidden=128, layers=6, heads=2, kv_heads=1, intermediate=256, vocab=400)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """400 tokens, more than half of them single bytes."""
    return train_tokenizer(["def speak(self):\n    return 'straße'\n"] * 9, TINY.vocab)


@pytest.mark.parametrize(("name", "millions"), [("small", 20), ("medium", 125)])
def test_models_have_the_size_they_are_named_for(name: str, millions: float) -> None:
    """The bound is 3 %, and only the shapes are counted."""
    shape = SHAPES[name]
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    total = shape.layers * layer + 2 * shape.vocab * shape.hidden + shape.hidden
    assert total / 1e6 == pytest.approx(millions, rel=0.03)
    with torch.device("meta"):
        model = build(shape, Tokenizer(BPE()))
    assert sum(each.numel() for each in model.parameters()) == total
    assert model.config.max_position_embeddings == 32_768


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


def test_the_same_weights_each_time(tiny: torch.nn.Module, tokenizer: Tokenizer) -> None:
    """Random numbers drawn before do not change the weights."""
    torch.rand(3)
    again = build(TINY, tokenizer).state_dict()
    assert all(torch.equal(again[name], each) for name, each in tiny.state_dict().items())
