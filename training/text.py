"""What the network reads: Python's own library, as tokens.

The standard library's sources, and its tests where the installation has them (python.org's and
pyenv's do, Debian and slim images do not). What `server/evaluation/held_out.py` holds out is kept
apart by path; tests are never held out and never part of an evaluation.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from server.corpus.held_out import library_documents, read_source
from training.tokenizer import EOS_ID

Tokens = NDArray[np.int64]
_LONGEST_TEST = 200_000  # characters; a few tests are tables of numbers


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, each ending with eos."""

    tokenizer: Tokenizer
    library: list[Tokens]
    tests: list[Tokens]
    held_out: list[Tokens]

    @property
    def num_tokens(self) -> dict[str, int]:
        """By part."""
        parts = {"library": self.library, "tests": self.tests, "held out": self.held_out}
        return {name: sum(len(each) for each in documents) for name, documents in parts.items()}


def tokenizer_texts() -> list[str]:
    """What the tokenizer learns from: the library without its tests."""
    return [document.text for document in library_documents(held_out=False)]


def read_corpus(tokenizer: Tokenizer) -> Corpus:
    """Everything in tokens; takes some ten seconds."""
    held_out = [document.text for document in library_documents(held_out=True)]
    return Corpus(
        tokenizer,
        _encoded(tokenizer, tokenizer_texts()),
        _encoded(tokenizer, _test_texts()),
        _encoded(tokenizer, held_out),
    )


def _test_texts() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"]) / "test"
    texts = (read_source(path) for path in sorted(folder.glob("test_*.py")))
    return [text for text in texts if 0 < len(text) <= _LONGEST_TEST]


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    return [
        np.array([*encoding.ids, EOS_ID], dtype=np.int64)
        for encoding in tokenizer.encode_batch(texts)
    ]
