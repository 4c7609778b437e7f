"""`serve` and `config check` with a hub id, from a small hub on this machine."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load, save

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.doubles.waiting import wait_until
from tests.server.startup.test_lifecycle import asking, process
from tests.servers.hub_server import MODEL, MODULE, FakeHub, serving, use_hub
from tests.servers.processes import run_here

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


def test_the_port_answers_while_the_model_is_downloaded_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is live but not ready. A 503 has the bytes so far, and when to try again."""
    files = in_two_files()
    flags = (MODEL, "--revision", "v1")
    with serving(FakeHub({MODEL: {"v1": files}}, waits_at=3_000_000)) as hub:
        monkeypatch.setenv("TEST_HUB", hub.url)
        monkeypatch.setenv("TEST_HUB_CACHE", str(tmp_path / "hub"))
        with process(tmp_path, *flags, module=MODULE) as started:
            assert started.get("/live").json() == {"status": "loading"}
            for path in ("/health", "/ready", "/v1/models", "/metrics"):
                answer = started.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
                assert answer.headers["retry-after"] == "5"
            error: dict[str, object] = {}

            def has_begun() -> bool:
                nonlocal error
                error = started.get("/ready").json()["error"]
                return bool(error.get("bytes_done"))

            wait_until(has_begun)
            assert error["phase"] == "downloading"
            total = sum(len(each) for name, each in files.items() if name.endswith(".safetensors"))
            assert isinstance(error["bytes_done"], int)
            assert 0 < error["bytes_done"] < total - 3_000_000
            # Config and tokenizer were downloaded before, and checked.
            assert error["bytes_total"] == total
            line = started.wait_for(r"(event=downloading.*)")[1]
            assert f"cache={tmp_path / 'hub'}" in line
            with asking(int(started.url.rpartition(":")[2])) as (seen, failed):
                wait_until(lambda: 503 in seen)
                hub.goes_on.set()
                started.wait_for("listening on")
                wait_until(lambda: 200 in seen)
            assert not failed, "no client is refused when the model takes over"
            assert set(seen) == {503, 200}
            for path in ("/live", "/health", "/ready", "/v1/models", "/metrics"):
                assert started.get(path).status_code == 200
            assert started.get("/v1/models").json()["data"][0]["id"] == "small"
            started.process.terminate()
            assert started.process.wait(30) == 0


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
