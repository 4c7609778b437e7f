"""A small corpus of the library's own text, and its tokenizer."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from ropewalk.server.corpus.held_out import library_documents
from training.shape import Shape
from training.text import Corpus
from training.tokenizer import EOS_ID, train_tokenizer

NATIVE_LEN = 256


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Forty training documents."""
    return [each.text for each in library_documents(held_out=False)[:40]]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    """A tokenizer of 600 tokens."""
    return train_tokenizer(texts, 600)


@pytest.fixture(scope="session")
def corpus(tokenizer: Tokenizer, texts: list[str]) -> Corpus:
    """Thirty library documents, and ten for both tests and held-out text."""
    tokens = [np.array([*tokenizer.encode(text).ids, EOS_ID], dtype=np.int64) for text in texts]
    return Corpus(tokenizer, tokens[:30], tokens[30:], tokens[30:])


@pytest.fixture
def shape() -> Shape:
    """A network of two layers with a sixteenth of the width."""
    return Shape(vocab=600, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96)
