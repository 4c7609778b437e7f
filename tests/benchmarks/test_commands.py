"""Every benchmark is imported, prints its help, and runs in its shortest form."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import quantised
from tests.model_runtime.formats.test_gguf_served import write_embedded
from tests.servers.processes import Server, running_server

ROOT = Path(__file__).resolve().parents[2]
_TINY_MIXTURE = (
    "--layers 1 --experts 4 --choices 2 --between 256 --hidden 256 --heads 4,2,64 --vocabulary 512"
)
# Module, or module and subcommand -> its shortest arguments. FOLDER is new for each run, and the
# other words in capitals are fixtures.
RUNS = {
    "cache.held_windows": "WINDOWS --formats auto --context 64 --new 4 --step 16",
    "cache.kv_cache": "MODEL --formats int8 --tokens 128 --rows 16 --contexts 128 --rounds 1",
    "cache.kv_disk": "MODEL --lengths 256 --starts off",
    "cache.kv_disk_decode": "MODEL --rounds 6",
    "compare.serving": "a=URL --record FOLDER/r.jsonl --scenarios single --rounds 1 --warmup 0 "
    "--vocab-size 2048",
    "cpu.decode_step": "MIXTURE --threads 1 --rounds 5",
    "cpu.kernels": "",
    "cpu.mixtures": "MIXTURE --threads 1 --rounds 3",
    "cpu.rounding": "STORED FOLDER --tokens 96 --rows 16",
    "cpu.state_drafts": "--layers 4 --rounds 1",
    "cpu.step_floors": "--shape medium --layers 1 --threads 1 --rounds 1",
    "cpu.thread_shares": "",
    "cpu.weights": "MODEL --ways float32,int8 --rounds 2",
    "gpu.attention": "--tiny",
    "gpu.launches": "",
    "gpu.model": "--tiny --out FOLDER --parts decode,prefill,bursts,arrivals,short_prompts,"
    "sampling,drafts,growth,windows,few_bits,queued,profile,memory,contenders",
    "models gguf-hybrid": "FOLDER/h.gguf --layers 4 --vocabulary 512",
    "models gguf-llama": "FOLDER/l.gguf --shape medium",
    "models gguf-mixture": f"FOLDER/m.gguf {_TINY_MIXTURE}",
    "models llama": "small FOLDER/small",
    "peers.weights w8a8": "MODEL FOLDER/eight",
    "server.chat_templates": "--turns 3",
    "server.host_steps": "--rounds 1 --sequences 2",
    "server.long_bodies": "URL",
    "server.policies": "URL --text TEXT --prompts 2 --turns 2",
    "server.router": "URL ROUTER --streams 2 --tokens 8 --rounds 1",
    "server.start": "--rounds 1 --cold-rounds 0",
    "server.streams": "--streams 4 --rates 500 --seconds 0.5 --rounds 1",
}
IN_THE_SUITE = "compare.serving"
# They judge the time of a busy machine, and may end with 1 for it.
JUDGES = {"server.chat_templates": "added at the median"}
# They import what an environment with llama.cpp has.
ELSEWHERE = {"peers.kv_cache", "peers.logits", "peers.mixture_steps"}
NO_OPTIONS = {"gpu.needs", "server.stream_server"}
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
    for path in (ROOT / "benchmarks").glob("*/*.py")
    if path.stem not in {"__init__", "__main__"}
)


@pytest.mark.parametrize("name", [each for each in MODULES if each not in ELSEWHERE])
def test_a_module_is_imported_and_a_command_has_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most benchmarks are run once in months, so a change elsewhere would break them unseen."""
    if name.startswith("gpu."):
        pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    module = importlib.import_module(f"benchmarks.{name}")
    if hasattr(module, "main") and name not in NO_OPTIONS:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert not ended.value.code
        assert "usage" in capsys.readouterr().out.lower()


@pytest.fixture(scope="module")
def model() -> str:
    return str(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="module")
def router(url: str) -> Iterator[str]:
    with running_server(url, subcommand="route") as running:
        yield running.url


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("benchmarks") / "text"
    path.write_text("\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))))
    return str(path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("benchmarks") / "mixture.gguf"
    assert run("models gguf-mixture", f"{path} {_TINY_MIXTURE}".split()).returncode == 0
    return str(path)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> str:
    case = next(each for each in CASES if each.name == "gemma3")
    return str(case.write(tmp_path_factory.mktemp("benchmarks") / "windows.gguf"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("benchmarks") / "embedded.gguf"
    return str(write_embedded(path, quantised(Type.Q8_0)))


def run(name: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *f"benchmarks.{name}".split(), *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == IN_THE_SUITE else pytest.mark.long) for name in RUNS],
)
def test_a_benchmark_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """It prints or writes something, and its code is 0."""
    places = {"FOLDER": str(tmp_path)}
    arguments = [
        re.sub(
            r"\b[A-Z]{3,}\b",
            lambda word: places.get(word[0]) or request.getfixturevalue(word[0].lower()),
            each,
        )
        for each in RUNS[name].split()
    ]
    ended = run(name, arguments)
    if ended.returncode == 1 and name in JUDGES:
        assert JUDGES[name] in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.strip() or any(tmp_path.iterdir())
