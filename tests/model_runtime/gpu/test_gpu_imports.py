"""A machine with a GPU needs no numba: what serves there imports none of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# An import hook raises for numba and llvmlite, as on a machine with versions that do not load.
WITHOUT_NUMBA = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numba", "llvmlite"}:
            raise ImportError(f"{name} does not load here")

sys.meta_path.insert(0, Refuse())
"""
# The model is on the CPU, where Triton's interpreter stands for the GPU.
SERVE = """
import torch
from ropewalk.model_runtime.runner import backends
from ropewalk.model_runtime.config import EngineConfig

backends.has_cpu_kernels = lambda device: False
backends.has_gpu_kernels = lambda device: True

from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.memory import memory_profile
from ropewalk.model_runtime.loading import checkpoint as loading
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.request import Request, SamplingParams

loading.has_gpu_kernels = lambda device: True
checkpoint = loading.load_checkpoint(EMBEDDED_MODEL, device="cpu", dtype="float32")
assert backends.described(checkpoint.device) == "Triton"
config = EngineConfig(kv_cache_tokens=256, max_model_len=128, enforce_eager=True)
engine = build_engine(checkpoint, config)
engine.start()
deployment = make_deployment("one", checkpoint.native, DeploymentOptions())
tier_choice = deployment.choose(RopeRequest(), 3, 2)
sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
(outputs,) = engine.generate([Request("one", (5, 6, 7), sampling, tier_choice)])
assert sum(len(each.token_ids) for each in outputs) == 2, outputs
engine.stop()
print(type(checkpoint.model.forward).__name__)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code from the project's root, under Triton's interpreter."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA + code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_a_model_is_loaded_and_answers_where_numba_does_not_load() -> None:
    """The whole path of a GPU, from the checkpoint to two tokens of an answer."""
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    ended = run(SERVE)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split()[-1] == "FlatForward"


def test_a_server_where_numba_does_not_load_has_a_cpu_served_by_torch() -> None:
    """Settings, planning, the application and the client of the benchmarks are imported.

    The description names the fault. It also shows that the refusal works.
    """
    ended = run(
        "from ropewalk.server.startup import app; import ropewalk.studies.bench.load\n"
        "import ropewalk.server.startup.planning.serving_plan\n"
        "import torch; from ropewalk.model_runtime.runner.backends import backend_for, described\n"
        "cpu = torch.device('cpu')\nprint(backend_for(cpu).__name__, described(cpu))"
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith("TorchAttention torch, slow (compiled kernels fail: ImportError")
