"""The parts of a model that a command needs, and the place where they are found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Called with the downloaded bytes and the bytes to download in total.
OnBytes = Callable[[int, int], None]


def no_bytes(_: int, __: int) -> None:
    """Ignore the bytes of a download."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of a model that a command needs, beside config and tokenizer."""

    weights: bool
    code: bool = False  # Python files, which run only if trust_remote_code is set


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model's folder, or its GGUF file, on this machine."""

    folder: Path
    has_weights: bool  # False only for a hub id whose weights are neither wanted nor cached
