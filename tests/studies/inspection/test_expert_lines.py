"""`inspect`, `config check` and the banner say which part of a mixture a token reads."""

import json
import re
from pathlib import Path

import pytest

from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.load_service import load_service
from tests.checkpoints.expert_files import expert_file
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.processes import run_here

NUM_ROUTED = 4 * 8 * 3 * 256 * 64  # layers, experts, matrices, numbers of one
IDLE = 6  # of 8 experts


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with experts in eight bits."""
    path = tmp_path_factory.mktemp("experts") / "m.gguf"
    return expert_file(path, ("Q8_0", "Q8_0", "Q8_0"), case="qwen3moe", width=64)


def test_every_place_says_the_same(file: Path) -> None:
    """Two of eight experts are read, at 34 bytes for 32 numbers; all else is float32."""
    report = run_here("inspect", str(file), "--json")
    assert report.returncode == 0, report.stderr
    costs = json.loads(report.stdout)["costs"]
    num_all = costs["num_parameters"]
    num_bytes = 4 * (num_all - NUM_ROUTED) + NUM_ROUTED * 34 // 32
    active = {
        "num_chosen": 2,
        "num_experts": 8,
        "num_parameters": num_all - NUM_ROUTED * IDLE // 8,
        "num_all": num_all,
        "num_bytes": num_bytes - NUM_ROUTED * 34 // 32 * IDLE // 8,
        "num_all_bytes": num_bytes,
    }
    assert costs["active"] == active
    sizes = size_text(active["num_bytes"]), size_text(num_bytes)
    text = (
        f"experts          2 of 8 for a token: {active['num_parameters'] / 1e6:,.4g} million of "
        f"{num_all / 1e6:,.4g} million parameters, {sizes[0]} of {sizes[1]} are active\n"
    )
    settings = file.with_name("ropewalk.yaml")
    settings.write_text(f"model: {file}\n")
    checked = run_here("config", "check", str(settings))
    assert checked.returncode == 0, checked.stderr
    _, banner = load_service(load_settings({"model": str(file), "device": "cpu"}))
    for told in (run_here("inspect", str(file)).stdout, checked.stdout, banner):
        assert text in told
        speed = re.search(r"memory speed     (\S+) GB/s read by .* at most (\S+) tokens/s", told)
        assert speed is not None, told
        rate, tokens = (float(each.replace(",", "")) for each in speed.groups())
        assert tokens == pytest.approx(1e9 * rate / active["num_bytes"], rel=0.02)


def test_experts_of_safetensors_are_counted_one_by_one(tmp_path: Path) -> None:
    """Its files name each expert; a model without experts has no such line."""
    for name, architecture in (("sparse", "mixtral"), ("dense", "llama")):
        tiny_model(architecture).save_pretrained(tmp_path / name)
        byte_tokenizer_fast().save_pretrained(tmp_path / name)
    report = run_here("inspect", str(tmp_path / "sparse"), "--json")
    costs = json.loads(report.stdout)["costs"]
    assert (costs["active"]["num_chosen"], costs["active"]["num_experts"]) == (2, 4)
    idle = 4 * 2 * 3 * 64 * 96
    assert costs["active"]["num_parameters"] == costs["num_parameters"] - idle
    assert (
        json.loads(run_here("inspect", str(tmp_path / "dense"), "--json").stdout)["costs"]["active"]
        is None
    )
