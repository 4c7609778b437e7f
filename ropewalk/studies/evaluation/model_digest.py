"""A digest of a model, which differs if the model's answers may differ."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ropewalk.model_runtime.attention.quantised.page_format import EXACT
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.files.folder_files import weight_files


def model_digest(checkpoint: Checkpoint, kv_cache_dtype: str, page_size: int) -> str:
    """Return a digest of a model as it was loaded from its folder or file.

    Rounding differs between dtypes and device types, so the digest has both. It tells quantised
    weights and rounded activations, too, and pages of `page_size` tokens that the cache quantises.
    """
    assert checkpoint.source is not None
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    weights = _files_digest(_files(checkpoint.source))
    facts = [weights, dtype, checkpoint.device.type]
    if checkpoint.distance is not None and checkpoint.low_bits is not None:
        facts.append(f"weights {checkpoint.low_bits.formats}")
    if checkpoint.rounding is not None:
        facts.append("activations int8")
    if kv_cache_dtype != EXACT:
        facts.append(f"kv {kv_cache_dtype} pages of {page_size}")
    digest = hashlib.sha256(" ".join(facts).encode())
    return digest.hexdigest()[:32]


def _files(source: Path) -> Sequence[Path]:
    """Return the files of the weights, and the config where it is a file of its own."""
    if source.is_dir():
        return [*sorted(weight_files(source)), source / "config.json"]
    from ropewalk.model_runtime.formats.gguf.gguf_file import (  # noqa: PLC0415  # only for such a file
        read_gguf,
    )

    return read_gguf(source).paths


def _files_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the files' contents."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
