"""The training text: Python's own library, as tokens.

The text is the standard library's sources, and its tests if the installation has them. Builds of
python.org and pyenv have the tests. Debian's packages and slim images do not.
`server/corpus/held_out.py` separates the held-out files by path. Tests are never held out and never
part of an evaluation.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ropewalk.server.corpus.held_out import library_documents, read_source
from training.tokenizer import EOS_ID

Tokens = NDArray[np.int64]
_LONGEST_TEST = 200_000  # characters; a few longer tests are tables of numbers


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens; each ends with eos."""

    tokenizer: Tokenizer
    library: list[Tokens]
    tests: list[Tokens]
    held_out: list[Tokens]

    @property
    def num_tokens(self) -> dict[str, int]:
        parts = {"library": self.library, "tests": self.tests, "held out": self.held_out}
        return {name: sum(len(each) for each in documents) for name, documents in parts.items()}


def tokenizer_texts() -> list[str]:
    """Return the texts that train the tokenizer: the library without tests and held-out files."""
    return [document.text for document in library_documents(held_out=False)]


def read_corpus(tokenizer: Tokenizer) -> Corpus:
    """Read and tokenize all parts, which takes about ten seconds."""
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
