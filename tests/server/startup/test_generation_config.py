"""`serve`, `config check` and `inspect` read generation_config.json alike."""

import json
import shutil
from pathlib import Path

import httpx

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.servers.processes import run_here, running_server, without_replicas

pytestmark = without_replicas

TOLD = [
    "generation_config.json: eos_token_id must have token ids from 0 to 2047, got '</s>'; left out,"
    " and the other end tokens apply",
    "generation_config.json: temperature must be a number from 0 to 2, got '0.7'; left out, and the"
    " default of requests applies",
    "generation_config.json: top_p must be a number above 0 and at most 1, got -1; left out, and "
    "the default of requests applies",
]


def test_all_commands_tell_what_is_left_out(tmp_path: Path) -> None:
    """Requests that leave the fields out have their own defaults, and the usable value."""
    model = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    stated = {"eos_token_id": "</s>", "temperature": "0.7", "top_p": -1, "top_k": 1}
    (model / "generation_config.json").write_text(json.dumps(stated))
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {model}\ndevice: cpu\n")

    warnings = [f"  warning          {each}" for each in TOLD]
    shown = run_here("config", "check", str(file)).stdout.splitlines()
    assert [line for line in shown if "warning" in line] == warnings
    found = json.loads(run_here("inspect", str(model), "--device", "cpu", "--json").stdout)
    assert found["left_out"] == TOLD

    with running_server("--config", str(file)) as server:
        lines = server.banner.splitlines()
        assert [line for line in lines if "warning  " in line] == warnings
        body = {"prompt": "import os", "max_tokens": 8}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body) for _ in range(3)]
        assert [each.status_code for each in answers] == [200] * 3
        texts = {each.json()["choices"][0]["text"] for each in answers}
        assert len(texts) == 1, "top_k 1 makes any seed greedy"
