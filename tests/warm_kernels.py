"""Compile kernels before tests run beside each other: `python -m tests.warm_kernels [DTYPE...]`.

Two workers and every server that they start would compile the same code at the same time. `make`
runs one process for each number type beside the type checker, which has one thread.
"""

import os
import sys
import time

import torch

from ropewalk.model_runtime.attention.batch import build_batch
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.loading.pack_model import expected_products
from ropewalk.server.process.preflight import bound_primitives
from ropewalk.server.settings.sections import CacheSettings
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.oracles.range_cases import CPU, METHODS, PlacedReads

# They have kernels that the embedded model has not: of experts, of states, and of both.
_OTHERS = ("mixtral", "lfm2", "qwen3_5_moe_text")
PAGE_SIZE: int = CacheSettings.model_fields["page_size"].default


def warm(dtype: str) -> None:
    """Compile what a server runs, and attention with and without ranges of keys."""
    checkpoint = load_checkpoint(EMBEDDED_MODEL, dtype=dtype)
    engines = EngineFactory()
    for kind in ("auto", "bfloat16", "int8"):
        engine = engines.over(checkpoint, page_size=PAGE_SIZE, kv_cache_dtype=kind)
        answer(engine, request(deployment_of(checkpoint), list(range(40)), max_tokens=3))
    engines.stop_all()
    for page in (16, 8):  # pairs of bfloat16 fit the first only
        laid = PlacedReads(METHODS["sinks"][0], dtype=getattr(torch, dtype), page=page)
        plain = [span._replace(table_id=laid.ids[1]) for span in laid.spans]
        for batch in (laid.batch, build_batch(plain, page, CPU)):
            CpuAttention(batch).read(laid.read())
    # The other process has the other order, so that few kernels of both types are compiled twice.
    for name in _OTHERS if dtype == "float32" else reversed(_OTHERS):
        checkpoint_of(in_dtype(tiny_model(name), getattr(torch, dtype)))
    bound_primitives(os.environ)  # as the command does; the products are remembered under it
    expected_products(torch.device("cpu"), getattr(torch, dtype))


if __name__ == "__main__":
    for name in sys.argv[1:] or ("float32", "bfloat16"):
        began = time.monotonic()
        warm(name)
        sys.stdout.write(f"kernels of {name}: {time.monotonic() - began:.0f} s\n")
