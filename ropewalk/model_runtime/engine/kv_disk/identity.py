"""The identity of a cache's pages: a hash of everything beside the prompt that decides their bits.

It covers the content of the weights, their form in memory, the layout of a page, and the
arithmetic: processor, libraries, and the sources of attention, kernels and layers. A name or a path
is no part of it. The profile and the salt of a request are in the keys of its pages.

A server's fingerprint keeps two parts apart. Servers that differ in `model_facts` or in weights
serve another model, and servers that differ in `arithmetic_facts` serve it on another machine.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ropewalk.model_runtime.attention.eight_bits import digest_of
from ropewalk.model_runtime.attention.quantised.page_format import FIXED8
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.gpu_nodes import has_gpu_kernels
from ropewalk.model_runtime.kept_facts import read_kept, write_kept
from ropewalk.model_runtime.known_trials import arithmetic_hash, kept_folder
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.files.file_versions import version_of
from ropewalk.model_runtime.runner.backends import (
    backend_for,
    described,
    multiplies_pairs,
)

_ROOT = Path(__file__).parents[3]
# Beside attention, kernels and layers: how weights and angles are made.
_SOURCES = (_ROOT / "rope", *(_ROOT / "model_runtime" / each for each in ("formats", "loading")))
_KNOWN = "weights.json"  # hashes by file, so that a restart reads no weights
_BLOCK = 1 << 20
_SHA256 = re.compile("[0-9a-f]{64}")


def identity_of(facts: Mapping[str, Any]) -> bytes:
    """Return the identity, 32 bytes, of facts that JSON can hold; their order does not matter."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).digest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_facts(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, object]:
    """Return what settings and files decide: number types, layers, and the length of a page."""
    plans = checkpoint.plans
    return {
        "dtype": dtype_name(checkpoint.dtype),
        "kv_cache_dtype": config.kv_cache_dtype,
        "page_size": config.page_size,
        "layers": [
            [index, plans[index].num_key_heads, plans[index].key_dim, plans[index].value_dim]
            for index in sorted(plans)
        ],
        "architecture": type(checkpoint.model).__name__,
        "weights_held": None if checkpoint.low_bits is None else checkpoint.low_bits.formats,
    }


def arithmetic_facts(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, object]:
    """Return what processor, libraries and our kernels decide."""
    has_inexact_rows = checkpoint.device.type == "cpu" and not checkpoint.report.bitwise
    return {
        "keys_by_token": backend_for(checkpoint.device).row_keys,
        "products": checkpoint.products,
        # `products` has those of linears, and experts round, too.
        "rounds": checkpoint.rounding is not None,
        "attention": described(checkpoint.device),
        # A trial by time decides this, so equal machines may differ.
        "pairs": multiplies_pairs(checkpoint.device, checkpoint.dtype),
        # Where a row's bits depend on the batch, they may depend on the threads of a CPU, too.
        "threads": torch.get_num_threads() if has_inexact_rows else None,
        "arithmetic": arithmetic_hash(*_SOURCES),
        # Another rounding of the self-check gives slightly different scales.
        "kv_scales": digest_of(checkpoint.scales) if config.kv_cache_dtype == FIXED8 else None,
        **_gpu_facts(checkpoint.device),
    }


def _gpu_facts(device: torch.device) -> dict[str, object]:
    """Return what a GPU, its libraries and the compiler of its kernels decide; none on a CPU."""
    if device.type != "cuda":
        return {}
    triton = version("triton") if has_gpu_kernels(device) else None
    return {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": [torch.version.cuda, torch.backends.cudnn.version(), triton],  # type: ignore[no-untyped-call]
    }


class ChangedError(OSError):
    """A file of the weights is no longer the one that was loaded."""


class WeightFiles:
    """The files that a model was loaded from, as they were before the load."""

    def __init__(self, source: Path, versions: Mapping[Path, str | None]) -> None:
        """Take the files of a folder, or the parts of a GGUF file, and their versions."""
        self._versions = versions
        if source.is_dir():
            self._names = {path: path.name for path in versions}
        else:  # parts in their order, so that another file name is the same model
            self._names = {path: f"gguf {at}" for at, path in enumerate(versions, 1)}

    def content(self, known_in: Path | None = None) -> str:
        """Return a hash of the content of weights, config and code.

        Hashes are kept in the folder `known_in`, by device, inode, size and times. Raises OSError,
        also if a file has changed since its version was noted, or has none.
        """
        found = hashlib.sha256()
        known = {} if known_in is None else read_kept(known_in / _KNOWN)
        before = dict(known)
        for path, name in self._names.items():
            found.update(f"{name} {self._hash_of(path, known)}\n".encode())
        if known_in is not None and known != before:
            write_kept(known_in / _KNOWN, known)
        return found.hexdigest()

    def _hash_of(self, path: Path, known: dict[str, Any]) -> str:
        version = self._versions[path]
        if version is None:
            raise ChangedError(f"{path} could not be looked at when the model was loaded")
        with path.open("rb") as file:
            if version_of(os.fstat(file.fileno())) != version:
                raise ChangedError(f"{path} has changed since it was loaded")
            kept = known.get(version)
            if isinstance(kept, str) and _SHA256.fullmatch(kept):
                return kept
            found = hashlib.sha256()
            while block := file.read(_BLOCK):
                found.update(block)
            if version_of(os.fstat(file.fileno())) != version:
                raise ChangedError(f"{path} has changed since it was loaded")
        known[version] = found.hexdigest()
        return found.hexdigest()


def hashes_folder(config: EngineConfig) -> Path:
    """Return the folder of known hashes, made if it can be: that of kv_disk, or of the kernels."""
    folder = config.kv_disk or kept_folder()
    with suppress(OSError):  # nothing is kept then
        folder.mkdir(parents=True, exist_ok=True)
    return folder
