"""`config check`, `inspect` and the banner say how weights are stored and served."""

import json
from pathlib import Path

import pytest
import structlog

from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.load_service import load_service
from tests.checkpoints.quantised_cases import case
from tests.servers.processes import run_here

STORED = {
    "fp8-blocks": "fp8 in blocks of 128 x 128",
    "gptq-ordered": "gptq (int4 in groups of 32)",
}


@pytest.mark.parametrize("name", STORED)
def test_every_place_says_the_same(name: str, tmp_path: Path) -> None:
    """The sizes are those of the files, and of the weights once they are loaded."""
    folder = tmp_path / "model"
    case(name).write(folder)
    report = run_here("inspect", str(folder), "--dtype", "bfloat16", "--json")
    assert report.returncode == 0, report.stderr
    costs = json.loads(report.stdout)["costs"]
    size = (folder / "model.safetensors").stat().st_size
    assert (costs["stored_in"], costs["stored_bytes"]) == (STORED[name], size)
    assert costs["parameter_bytes"] == 2 * costs["num_parameters"] > size

    text = run_here("inspect", str(folder), "--dtype", "bfloat16").stdout
    line = f"stored in        {STORED[name]}, {size_text(size)} in the files; dequantised at load\n"
    assert line in text

    served = f"stored in {STORED[name]}, served in bfloat16, {size_text(costs['weight_bytes'])}"
    note = "; activations are not quantised" if name == "fp8-blocks" else ""
    line = f"  weights          {served}{note}\n"
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {folder}\ndtype: bfloat16\n")
    checked = run_here("config", "check", str(file))
    assert line in checked.stdout, checked.stderr
    phases: list[str] = []
    settings = load_settings({"model": str(folder), "dtype": "bfloat16", "device": "cpu"})
    with structlog.testing.capture_logs() as logged:
        _, banner = load_service(settings, phases.append)
    assert line in banner
    assert f"dequantising {STORED[name]} to bfloat16" in phases
    (entry,) = [each for each in logged if each["event"] == "dequantising"]
    assert entry["stored_in"] == STORED[name]
    assert (entry["served_in"], entry["stored_bytes"]) == ("bfloat16", size)
    assert entry["loaded_bytes"] == costs["parameter_bytes"]
