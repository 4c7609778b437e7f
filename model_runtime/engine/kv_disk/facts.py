"""What decides the bits of a model's numbers beside the content of its files.

The tier on disk has all of it in the identity of its pages. A server's fingerprint keeps the two
parts apart: servers that differ in the first one serve another model, and servers that differ in
the second one serve it on another machine.
"""

from pathlib import Path

import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.known_trials import fingerprint
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.backends import backend_for, described, multiplies_pairs

_ROOT = Path(__file__).parents[3]
# Beside attention, kernels and layers: how weights and angles are made.
_SOURCES = (_ROOT / "rope", *(_ROOT / "model_runtime" / each for each in ("formats", "loading")))


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


def arithmetic_facts(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what processor, libraries and our kernels decide."""
    return {
        "keys_by_token": backend_for(checkpoint.device).row_keys,
        "products": checkpoint.products,
        "attention": described(checkpoint.device),
        # A trial by time decides this, so equal machines may differ.
        "pairs": multiplies_pairs(checkpoint.device, checkpoint.dtype),
        # Where the self-check found that a row's bits depend on the batch, threads may, too.
        "threads": None if checkpoint.report.bitwise else torch.get_num_threads(),
        "arithmetic": fingerprint(*_SOURCES),
    }
