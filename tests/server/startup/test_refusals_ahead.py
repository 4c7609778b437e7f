"""What needs no weights is refused before them: by `serve`, `config check` and `doctor` alike."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from ropewalk.model_runtime.attention.quantised.page_format import refuse_format_on
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.engine.kv_disk.files.page_file import HEADER_BYTES
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.gate import checked
from ropewalk.server.startup.planning.dry_run import outlook_of, refuse_ahead
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.serving_plan import plan_layout, plan_serving
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written
from tests.checkpoints.tiny_models import tiny_config
from tests.doubles.planned import model_facts
from tests.servers.processes import run_here, run_to_end

_SINKS = {
    "rope_scaling": {"rope_type": "default", "positions": {"method": "sinks"}},
    "max_model_len": 1000,
}
_BROKEN = "{{ 1 }"
_GIB = 2**30


def _copied(folder: Path, name: str, change: Callable[[str], str]) -> dict[str, object]:
    """Copy the embedded model with a file of it changed."""
    path = Path(shutil.copytree(EMBEDDED_MODEL, folder / "model")) / name
    path.write_text(change(path.read_text()))
    return {"model": str(path.parent)}


def _layers_of_two_kinds(folder: Path) -> dict[str, object]:
    """A config without weights."""
    model = _copied(folder, "config.json", lambda _: json.dumps(_gemma()))
    return {**model, **_SINKS}


def _gemma() -> dict[str, object]:
    config: dict[str, object] = tiny_config("gemma3_text").to_dict()
    return {**config, "architectures": ["Gemma3ForCausalLM"]}


def _file_with_template(folder: Path) -> dict[str, object]:
    case = next(each for each in CASES if each.name == "llama")
    path = case.write(folder / "m.gguf", Written({"tokenizer.chat_template": _BROKEN}))
    return {"model": str(path)}


# name -> what makes the settings, and the sentence
_REFUSED: Mapping[str, tuple[Callable[[Path], Mapping[str, object]], str]] = {
    "a folder that cannot be made": (
        lambda _: {"kv_disk": "/proc/x", "kv_disk_gib": 1},
        "kv_disk: cannot make /proc/x: /proc takes no new folder (No such file or directory)",
    ),
    "a folder for few pages": (
        lambda folder: {"kv_disk": str(folder / "kv"), "kv_disk_gib": 0.001},
        "kv_disk_gib must be >= 0.00782, for 32 pages of 256 KiB, got 0.001",
    ),
    "layers that read released pages": (
        _layers_of_two_kinds,
        "positions: sinks is not served for a model with layers that rotate otherwise",
    ),
    "a template": (
        lambda folder: _copied(folder, "chat_template.jinja", lambda _: _BROKEN),
        "the chat template, line 1: unexpected '}'",
    ),
    "a file's template": (_file_with_template, "the chat template, line 1: unexpected '}'"),
    "a cut tokenizer": (
        lambda folder: _copied(folder, "tokenizer.json", lambda text: text[:500]),
        "model: Unterminated string starting at: line",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_the_checks_and_serve_say_the_same_before_weights_are_read(
    name: str, tmp_path: Path
) -> None:
    """The code is 2, and the log of `serve` has no line about weights."""
    make, sentence = _REFUSED[name]
    file = tmp_path / "ropewalk.yaml"
    stated = {"device": "cpu", "kv_cache_tokens": 16384, "port": 0, **make(tmp_path)}
    file.write_text(json.dumps(stated))
    by_check = run_here("config", "check", str(file))
    assert by_check.returncode == 2, by_check.stdout
    (told,) = (each for each in by_check.stderr.splitlines() if each.startswith("ropewalk: "))
    assert sentence in told
    by_serve = run_to_end("serve", "--config", str(file))
    assert by_serve.returncode == 2
    assert by_serve.stderr.splitlines()[-1] == told
    assert "loading_weights" not in by_serve.stderr
    by_doctor = run_here("doctor", "--config", str(file))
    assert by_doctor.returncode == 2
    (line,) = (each for each in by_doctor.stdout.splitlines() if each.startswith("fail "))
    assert line.endswith(told.removeprefix("ropewalk: "))


def test_variables_of_traces_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the SDK knows what it takes."""
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    told = r"^traces: the OTEL_\* variables cannot be used: max_queue_size must be a positive"
    with pytest.raises(SettingsError, match=told):
        checked(load_settings({"traces": True}))


def test_replicas_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(SettingsError, match=r"^replicas needs Ray: pip install .*, got 2$"):
        checked(load_settings({"replicas": "2"}))


@pytest.mark.parametrize("kind", ["auto", "fixed8", "k8v4"])
def test_the_plan_knows_the_bytes_of_a_page(
    embedded: Checkpoint, kind: str, tmp_path: Path
) -> None:
    """The smallest folder that is accepted has 32 files of the pages that an engine has."""
    stated = {"kv_cache_tokens": "4096", "kv_cache_dtype": kind, "kv_disk": str(tmp_path / "kv")}
    settings = load_settings({**stated, "kv_disk_gib": "1"})
    config = plan_serving(settings, facts_of(embedded, settings)).config
    pages = build_runner(embedded, config).store.page_memory()
    least = 32 * (HEADER_BYTES + sum(each.shape[1] for each in pages)) / _GIB
    for gib, is_enough in ((least, True), (least * 0.999, False)):
        asked = load_settings({**stated, "kv_disk_gib": repr(gib)})
        for plans in (outlook_of, refuse_ahead):
            if is_enough:
                plans(asked)
            else:
                with pytest.raises(ModelError, match="kv_disk_gib must be >= "):
                    plans(asked)


@pytest.mark.parametrize(
    ("gib", "sentence"),
    [
        ("1e-6", "kv_offload_gib must be >= 6.1e-05, for one page of 64 KiB, got 1e-06"),
        ("9", r"pages in host memory \(kv_offload_gib 9\) need 9 GiB, this machine has 8 GiB"),
    ],
)
def test_host_memory_of_a_gpu_is_looked_at_before_the_load(
    embedded: Checkpoint, gib: str, sentence: str
) -> None:
    """Also where the cache is sized by a measurement that needs the loaded model."""
    settings = load_settings({"kv_offload_gib": gib})
    on_gpu = {"gpu_bytes": 80 * _GIB, "host": MachineMemory(8 * _GIB, 8 * _GIB)}
    facts = model_facts(settings, embedded.native, **on_gpu)
    with pytest.raises(ModelError, match=sentence):
        plan_layout(settings, facts)
    larger = {**on_gpu, "host": MachineMemory(10 * _GIB, 10 * _GIB)}
    plan_layout(settings, model_facts(settings, embedded.native, 8, **larger))


@pytest.mark.parametrize(
    ("device", "kind", "told"),
    [
        *(("cuda", each, "on a GPU it must be auto or fixed8") for each in ("int4", "bfloat16")),
        ("xpu", "fixed8", "fixed8 needs the model on a CPU or on a GPU with triton"),
    ],
)
def test_a_device_without_kernels_has_no_such_pages(device: str, kind: str, told: str) -> None:
    refuse_format_on(torch.device("cpu"), kind)
    refuse_format_on(torch.device(device), "auto")
    with pytest.raises(ModelError, match=told):
        refuse_format_on(torch.device(device), kind)
