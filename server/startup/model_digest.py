"""A digest of a model, which differs if the model's answers may differ."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from model_runtime.gguf.file import read_gguf
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.loading.model_config import ModelConfig, weight_files
from server.settings.load import ServeSettings
from server.startup.dry_run import outline_of


def model_digest(settings: ServeSettings, checkpoint: Checkpoint) -> str:
    """Return a digest of the settings' model as it was loaded.

    Rounding differs between dtypes and device types, so the digest has both.
    """
    weights = _weights_digest(outline_of(settings))
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    digest = hashlib.sha256(f"{weights} {dtype} {checkpoint.device.type}".encode())
    return digest.hexdigest()[:32]


def _weights_digest(outline: ModelConfig) -> str:
    """Return a digest of a model folder's weights and config."""
    folder = Path(outline.source)
    if folder.is_file():
        return _files_digest(read_gguf(folder).paths)
    return _files_digest([*sorted(weight_files(folder)), folder / "config.json"])


def _files_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the files' contents."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
