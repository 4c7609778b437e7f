"""`serve` and `config check` with a hub id, from a small hub on this machine."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load, save

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.load import SettingsError, load_settings
from tests.servers.hub_server import MODEL, FakeHub, serving, use_hub
from tests.servers.processes import command, run_here

FILES = {path.name: path.read_bytes() for path in EMBEDDED_MODEL.iterdir() if path.is_file()}


def in_two_files() -> dict[str, bytes]:
    """The embedded model with its embedding in a file of its own, which is the smaller one."""
    parts = load(FILES["model.safetensors"]), {}
    name = "model.embed_tokens.weight"
    parts[1][name] = parts[0].pop(name)
    files = {
        f"model-{at}-of-2.safetensors": save(part, {"format": "pt"})
        for at, part in enumerate(parts, start=1)
    }
    placed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = json.dumps({"metadata": {}, "weight_map": placed}).encode()
    others = {name: each for name, each in FILES.items() if name != "model.safetensors"}
    return {**others, **files, "model.safetensors.index.json": index}


def next_line(process: subprocess.Popen[str], pattern: str) -> str:
    """Read standard error up to a line with the pattern, and return its first group."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError("".join(seen))


def test_the_port_says_how_far_the_download_is(tmp_path: Path) -> None:
    """The 503 has the bytes so far while the model is downloaded; then it is served."""
    files = in_two_files()
    hub = FakeHub({MODEL: {"v1": files}}, waits_at=3_000_000)
    with serving(hub):
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        process = subprocess.Popen(
            command("serve", MODEL, "--revision", "v1", "--port", "0"),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, "HF_HUB_OFFLINE": "0"},
        )
        try:
            url = next_line(process, r"^loading; (\S+)")
            deadline = time.monotonic() + 60
            error: dict[str, object] = {}
            while not error.get("bytes_done") and time.monotonic() < deadline:
                error = httpx.get(f"{url}/ready", timeout=10).json()["error"]
                time.sleep(0.05)
            assert error["phase"] == "downloading"
            total = sum(len(each) for name, each in files.items() if name.endswith(".safetensors"))
            assert isinstance(error["bytes_done"], int)
            assert 0 < error["bytes_done"] < total - 3_000_000
            # Config and tokenizer were downloaded before, and checked.
            assert error["bytes_total"] == total
            line = next_line(process, r"(event=downloading.*)")
            assert f"cache={tmp_path / 'hub'}" in line
            hub.goes_on.set()
            next_line(process, r"(listening on)")
            assert httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"] == "small"
        finally:
            process.terminate()
            process.wait(30)
            assert process.stderr is not None
            process.stderr.close()
    assert process.returncode == 0


def test_config_check_downloads_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory of the weights is counted when they are cached."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {MODEL}\nrevision: v1\ndevice: cpu\n")
    with serving(FakeHub({MODEL: {"v1": FILES}})) as hub:
        use_hub(monkeypatch, hub.url, str(tmp_path / "cache"), offline=False)
        checked = run_here("config", "check", str(file))
        assert checked.returncode == 0, checked.stderr
        assert "15.3 MiB weights" in checked.stdout
        assert "model.safetensors" not in hub.fetched()
        monkeypatch.setenv("ROPEWALK_REVISION", "v2")
        checked = run_here("config", "check", str(file))
        assert checked.returncode == 2
        assert checked.stderr.startswith("ropewalk: revision v2 of owner/small does not exist")


def test_inspect_and_doctor_take_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither downloads weights. Parameters are those of the config."""
    with serving(FakeHub({MODEL: {"main": FILES}})) as hub:
        use_hub(monkeypatch, hub.url, str(tmp_path), offline=False)
        inspected = run_here("inspect", MODEL, "--device", "cpu")
        assert inspected.returncode == 0, inspected.stderr
        assert "32 pairs, base 10000" in inspected.stdout
        assert "3.476 million" in inspected.stdout
        diagnosed = run_here("doctor", MODEL, "--device", "cpu", "--port", "0")
        assert "LlamaForCausalLM, cpu, float32" in diagnosed.stdout
        assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("model", "named"), [({}, "the embedded model"), ({"model": "/models/x"}, "the path /models/x")]
)
def test_a_revision_needs_a_hub_id(model: dict[str, str], named: str) -> None:
    """A flag without effect is refused when the settings are read."""
    with pytest.raises(SettingsError, match=f"revision is for a model by hub id, and {named} has"):
        load_settings({**model, "revision": "main"})
