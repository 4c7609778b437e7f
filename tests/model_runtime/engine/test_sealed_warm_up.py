"""A server with another cache than `auto` compiles its kernels before its first request."""

import subprocess
import sys

import pytest

_SCRIPT = """
import gc
import sys
from numba.core.dispatcher import Dispatcher
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine
from tests.doubles.engines import answer, deployment_of, request

def compiled():
    found = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
    return {(each.py_func.__qualname__, str(key)) for each in found for key in each.overloads}

checkpoint = load_checkpoint(EMBEDDED_MODEL)
deployment = deployment_of(checkpoint)
config = EngineConfig(kv_cache_tokens=1024, max_model_len=512, kv_cache_dtype=sys.argv[1])
profiles = [tier.profile for tier in deployment.own_tiers]
engine = build_engine(checkpoint, config, profiles=profiles)
before = compiled()
engine.start()
answer(engine, *(request(deployment, [7] * num, max_tokens=40) for num in (100, 30)))
engine.stop()
kernel, of = sys.argv[2:]
is_there = any(name == kernel and of in key for name, key in before)
print(is_there, sorted(compiled() - before))
"""


@pytest.mark.parametrize(
    ("kind", "kernel", "of"),
    [("int4", "write_pages", ""), ("bfloat16", "write_kv", "uint16")],
)
def test_no_request_compiles_a_kernel(kind: str, kernel: str, of: str) -> None:
    """Prompts over several pages and decodes in one call; a process of its own has none before."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, kind, kernel, of],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stdout.splitlines()[-1:] == ["True []"], ended.stderr
