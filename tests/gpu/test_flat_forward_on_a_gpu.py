"""A forward as a list of launches on a GPU, beside the model's modules: `make gpu-check`."""

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.compilations import CONFIG, PROFILES, random_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_launches_compute_what_modules_compute(dtype: str) -> None:
    """Random decodes, prompts and chunks under many tables; both write the same cache."""
    loaded = load_checkpoint(EMBEDDED_MODEL, device="cuda", dtype=dtype)
    model: Any = loaded.model
    flat = model.forward
    assert type(flat) is FlatForward
    num_pages = CONFIG.kv_cache_tokens // CONFIG.page_size
    layout = loaded.cache_layout(CONFIG.page_size, "auto")
    store = KVCache(layout, num_pages, loaded.device, row_keys=True)
    tables = RopeTables(loaded.native, CONFIG.page_size, CONFIG.max_model_len, loaded.device)
    for profile in PROFILES:
        tables.id_of(profile)
    runner = ModelRunner(
        model, loaded.plans, store, tables, CONFIG.page_size, backend=TritonAttention
    )
    bound = 0.05 if dtype == "bfloat16" else 1e-3
    for spans in random_steps(random.Random(3), 30):
        got = runner.run(spans).clone()
        del model.forward
        expected = runner.run(spans)
        model.forward = flat
        assert float((got - expected).abs().max()) <= bound * float(expected.abs().max())
