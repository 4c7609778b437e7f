"""Runners on a CPU whose attention is the GPU's, by kernels that Triton interprets."""

import pytest
import torch

from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner import backends, model_runner
from tests.doubles.engines import tiny_checkpoint


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runners that are built from now on read by the GPU's kernels."""
    for module in (backends, model_runner):
        monkeypatch.setattr(module, "backend_for", lambda _: TritonAttention)
    monkeypatch.setattr(backends, "has_gpu_kernels", lambda _: True)  # for sealed pages


def interpreted_checkpoint(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Checkpoint:
    """A checkpoint for these kernels: a Llama of one layer, or the parameter's name and layers."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here; tests/gpu runs compiled ones")
    name, num_layers = getattr(request, "param", ("llama", 1))
    made = tiny_checkpoint(name, num_hidden_layers=num_layers)
    use_triton(monkeypatch)
    return made
