"""Runners on a CPU whose attention is the GPU's, by kernels that Triton interprets."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ropewalk.model_runtime.attention import exact_work, work_list
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.exact import attention as exact_attention
from ropewalk.model_runtime.gpu.exact import product
from ropewalk.model_runtime.loading import checkpoint, install_forward, pack_model, self_check
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.probing.untouched import LONG_LEN
from ropewalk.model_runtime.runner import backends, model_runner
from tests.doubles.engines import tiny_checkpoint


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runners that are built from now on read by the GPU's kernels."""
    for module in (backends, model_runner):
        monkeypatch.setattr(module, "backend_for", lambda _: TritonAttention)
    monkeypatch.setattr(backends, "has_cpu_kernels", lambda _: False)  # for codes


def load_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that are loaded from now on have a GPU's modules and attention, interpreted."""
    use_triton(monkeypatch)
    check_few_decodes(monkeypatch)
    monkeypatch.setattr(self_check, "backend_for", lambda _: TritonAttention)
    for module in (backends, checkpoint, pack_model):
        for name, answer in (("has_gpu_kernels", True), ("has_cpu_kernels", False)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda _, answer=answer: answer)


def check_few_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a load check two decode steps; the second reads what the first wrote."""
    for module in (self_check, install_forward):
        monkeypatch.setattr(module, "DECODE_START", LONG_LEN - 2)


def load_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models load as on a GPU, whose products add a row alike in every shape."""
    load_as_on_a_gpu(monkeypatch)
    exact_products(monkeypatch)
    small_sizes(monkeypatch)


def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut contexts into pieces of one tile of keys, and let few rows have all ways of products."""
    monkeypatch.setattr(product, "_MOST_APART", 130)
    monkeypatch.setattr(product, "_TRIED", (1, 17, 65, 131))
    monkeypatch.setattr(exact_attention, "_PIECE_TILES", tl.constexpr(1))
    monkeypatch.setattr(exact_attention, "_MOST_ROWS", 16)
    for module in (exact_attention, exact_work):
        monkeypatch.setattr(module, "PIECE_TILES", 1)
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)


def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round the interpreter's products from float64.

    A GPU's instructions add a row alike in every shape, and numpy does not in float32. In float64
    another order hardly ever gives another float32.
    """

    def dot(_: object, a: Any, b: Any, d: Any, *__: object) -> TensorHandle:
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle((exact + d.data).astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def interpreted_checkpoint(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Checkpoint:
    """A checkpoint for these kernels: a Llama of one layer, or the parameter's name and layers."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here; tests/gpu runs compiled ones")
    name, num_layers = getattr(request, "param", ("llama", 1))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    made = tiny_checkpoint(name, num_hidden_layers=num_layers, **heads)
    use_triton(monkeypatch)
    return made
