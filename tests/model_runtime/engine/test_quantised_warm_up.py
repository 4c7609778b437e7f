"""A server compiles its kernels before its first request, also those of rare steps."""

import json
import subprocess
import sys

import pytest

_COMPILED = """
import gc
import sys
from numba.core.dispatcher import Dispatcher
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine
from tests.doubles.engines import answer, deployment_of, request

def compiled():
    found = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
    return {(each.py_func.__qualname__, str(key)) for each in found for key in each.overloads}
"""
_CACHES = """
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

checkpoint = load_checkpoint(EMBEDDED_MODEL)
deployment = deployment_of(checkpoint)
profiles = [tier.profile for tier in deployment.own_tiers]
found = []
for kind, kernel, of in (("int4", "write_pages", ""), ("bfloat16", "write_kv", "uint16")):
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=512, kv_cache_dtype=kind)
    engine = build_engine(checkpoint, config, profiles=profiles)
    before = compiled()
    engine.start()
    answer(engine, *(request(deployment, [7] * num, max_tokens=40) for num in (100, 30)))
    engine.stop()
    found.append(any(name == kernel and of in key for name, key in before))
    found.append(sorted(compiled() - before))
print("=", *found)
"""
_DRAFTS = """
import json
from dataclasses import replace
import torch
from ropewalk.model_runtime.engine import speculator
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import checkpoint_of
from tests.oracles.draft_adversary import Counted, take_all

speculator.take = take_all
checkpoint = checkpoint_of(in_dtype(tiny_model("qwen3_5_text"), torch.bfloat16))
deployment = deployment_of(checkpoint, page_size=32, **json.loads(sys.argv[2]))
num = 50 if sys.argv[2] == "{}" else 100  # with a method, beyond the native length
sizes = {"kv_cache_tokens": 1024, "max_model_len": 256, "page_size": 32, "max_draft_tokens": 15}
config = EngineConfig(**sizes, kv_cache_dtype=sys.argv[1])
profiles = [tier.profile for tier in deployment.own_tiers]
counted = Counted()
engine = build_engine(checkpoint, config, counted, profiles)
before = compiled()
engine.start()
right = answer(engine, request(deployment, [7] * num, max_tokens=30))[0].token_ids
for ids in (right, (8,) * 30):
    again = replace(request(deployment, [7] * num, max_tokens=30), prediction_ids=ids)
    answer(engine, again)
engine.stop()
print("=", counted.num_accepted > 0, sorted(compiled() - before))
"""
_RANGES = {
    "rope_scaling": {"rope_type": "default", "positions": {"method": "rerope", "window": 16}},
    "max_model_len": 256,
}


_FORKS = """
import json
import os

for script, *arguments in json.loads(sys.argv[1]):
    if not os.fork():
        sys.argv[1:] = arguments
        exec(script)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def _told(*scripts: tuple[str, ...]) -> str:
    """Run scripts, each in a fork of a process that has compiled nothing; return their lines."""
    ended = subprocess.run(
        [sys.executable, "-c", _COMPILED + _FORKS, json.dumps(scripts)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = [line for line in ended.stdout.splitlines() if line.startswith("= ")]
    return "\n".join(told) if len(told) == len(scripts) else ended.stderr


def test_no_request_and_no_draft_compiles_a_kernel() -> None:
    """Prompts over several pages, decodes in one call, and ranges in steps with drafts.

    Steps with drafts of a model with states run its own forward, with its own number types.
    """
    drafts = _DRAFTS, "auto", json.dumps(_RANGES)
    assert _told((_CACHES,), drafts) == "= True [] True []\n= True []"


@pytest.mark.long
def test_no_draft_over_few_bits_compiles_a_kernel() -> None:
    assert _told((_DRAFTS, "int4", "{}")) == "= True []"
