"""Compile the kernels before tests run beside each other: `python -m tests.warm_kernels`.

Two workers and every server that they start would compile the same code at the same time.
"""

import sys
import time

from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.sections import CacheSettings
from tests.engines import EngineFactory, answer, deployment_of, request

PAGE_SIZE: int = CacheSettings.model_fields["page_size"].default

if __name__ == "__main__":
    for dtype in ("float32", "bfloat16"):
        began = time.monotonic()
        checkpoint = load_checkpoint(EMBEDDED_MODEL, dtype=dtype)
        engines = EngineFactory()
        engine = engines.over(checkpoint, page_size=PAGE_SIZE)
        answer(engine, request(deployment_of(checkpoint), list(range(40)), max_tokens=3))
        engines.stop_all()
        sys.stdout.write(f"kernels of {dtype}: {time.monotonic() - began:.0f} s\n")
