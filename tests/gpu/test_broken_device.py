"""A real illegal access ends the engine, and its clients hear of it first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

import triton
import triton.language as tl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def _write_far(target):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    tl.store(target + (1 << 44), 1)


def serve_on_a_device_that_breaks() -> None:
    """Serve an endless request, and write to an illegal address when it has ten tokens."""
    import threading

    from ropewalk.model_runtime.config import EngineConfig
    from ropewalk.model_runtime.engine.build_engine import build_engine
    from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
    from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
    from ropewalk.model_runtime.runner.model_runner import ModelRunner
    from tests.doubles.engines import deployment_of, request

    checkpoint = load_checkpoint(EMBEDDED_MODEL, device="cuda")
    config = EngineConfig(kv_cache_tokens=4096, max_model_len=2048)
    engine = build_engine(checkpoint, config)
    launch, num_launched, died = ModelRunner.launch, 0, threading.Event()

    def launch_and_break(*arguments: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 10:
            _write_far[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
        return launch(*arguments)

    ModelRunner.launch = launch_and_break  # type: ignore[method-assign]
    engine.start(died.set)
    asked = request(deployment_of(checkpoint), [1, 2, 3], max_tokens=500, ignore_eos=True)
    (outputs,) = engine.generate([asked])
    sys.stdout.write(f"heard: {outputs[-1].error}\n")
    sys.stdout.write(f"died: {died.wait(30)}\n")


def test_clients_hear_of_an_illegal_access() -> None:
    """The process is not aborted before the engine's thread has ended every request."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_broken_device"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "heard: the engine stopped\ndied: True\n" in ended.stdout, ended.stderr[-4000:]
    assert "illegal memory access" in ended.stdout + ended.stderr


if __name__ == "__main__":
    serve_on_a_device_that_breaks()
