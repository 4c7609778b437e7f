"""Runners on a CPU whose attention is the GPU's, by kernels that Triton interprets."""

import pytest
import torch

from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.loading import checkpoint, pack_model, self_check
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
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
    monkeypatch.setattr(self_check, "backend_for", lambda _: TritonAttention)
    for module in (backends, checkpoint, pack_model):
        for name, answer in (("has_gpu_kernels", True), ("has_cpu_kernels", False)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda _, answer=answer: answer)


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
