"""Finished cells of the tier-change comparison, a line each, so that a run can be resumed."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from model_runtime.loading.checkpoint import Checkpoint
from server.jsonl_file import LineFile
from server.policy_eval.measure import CrossingPolicy, Outcome
from server.policy_eval.windows import CrossingError, Window

FILE = "crossings.jsonl"
_ROWS = 256  # of the embedding, enough to distinguish two trainings


@dataclass(frozen=True, slots=True)
class Cell:
    """Some windows under one policy, which are measured together."""

    method: str
    policy: CrossingPolicy
    num_crossings: int
    group: int  # which windows, counted from 0

    @property
    def label(self) -> str:
        """Return a label for the progress display."""
        return f"{self.method} {self.policy}, crossings: {self.num_crossings}, group {self.group}"


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a digest of a model: its config, the start of its embedding, its norms and biases."""
    config = json.dumps(checkpoint.model.config.to_dict(), sort_keys=True, default=str)  # type: ignore[union-attr,operator]
    digest = hashlib.blake2b(config.encode(), digest_size=16)
    digest.update(f"{checkpoint.dtype} {checkpoint.device.type}".encode())
    with torch.inference_mode():
        embedding = checkpoint.model.get_input_embeddings()  # type: ignore[operator]
        tensors = [embedding.weight[:_ROWS]]
        tensors += [each for each in checkpoint.model.parameters() if each.dim() == 1]
        for tensor in tensors:
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def key_of(cell: Cell, windows: Sequence[Window], model: str, engine: str) -> str:
    """Return a digest of everything that affects the outcome: cell, tokens, model and engine."""
    digest = hashlib.blake2b(f"{cell} {model} {engine}".encode(), digest_size=16)
    for window in windows:
        digest.update(repr(window).encode())
    return digest.hexdigest()


class Record:
    """Outcomes by key, in an append-only file."""

    def __init__(self, folder: Path, *, resumes: bool) -> None:
        """Read the existing file, or start a new one. Raises CrossingError if not a folder."""
        self._path = folder / FILE
        self._lines = LineFile(self._path)
        self._found: dict[str, list[Outcome]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not resumes:
                self._path.unlink(missing_ok=True)
            elif self._path.exists():
                self._read()
        except OSError as error:
            raise CrossingError(f"output: {error.filename}: {error.strerror}") from error

    def get(self, key: str) -> list[Outcome] | None:
        """Return the outcomes measured under this key, or None."""
        return self._found.get(key)

    def add(self, key: str, cell: Cell, outcomes: Sequence[Outcome]) -> None:
        """Save a finished cell to disk at once."""
        line = {"key": key, **asdict(cell), "windows": [asdict(each) for each in outcomes]}
        self._lines.add(line)
        self._found[key] = list(outcomes)

    def _read(self) -> None:
        for number, line in self._lines.lines():
            try:
                found = json.loads(line)
                self._found[found["key"]] = [_outcome(each) for each in found["windows"]]
            except (ValueError, TypeError, KeyError) as error:
                raise CrossingError(
                    f"output: line {number} of {self._path} is no finished cell; without resuming "
                    "it is begun anew"
                ) from error


def _outcome(fields: dict[str, list[float]]) -> Outcome:
    values = {
        name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()
    }
    return Outcome(**values)  # type: ignore[arg-type]
