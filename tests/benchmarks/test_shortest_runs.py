"""Every benchmark runs in its shortest form, so that none is found broken when it is needed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.gguf_cases import CASES
from tests.servers.processes import Server, running_server

ROOT = Path(__file__).resolve().parents[2]
_TINY_MIXTURE = (
    "--layers 1 --experts 4 --choices 2 --between 256 --hidden 256 --heads 4,2,64 --vocabulary 512"
)
# Module -> its shortest arguments. FOLDER is new for each run, and the words in capitals stand for
# what `places` makes.
RUNS = {
    "chat_templates": "--turns 3",
    "cpu_kernels": "",
    "decode_step": "MIXTURE --threads 1 --rounds 5",
    "gpu_launches": "",
    "held_windows": "WINDOWS --formats auto --context 64 --new 4 --step 16",
    "host_steps": "--rounds 1 --sequences 2",
    "kv_cache": "MODEL --formats int8 --tokens 128 --rows 16 --contexts 128 --rounds 1",
    "kv_disk": "MODEL --lengths 256 --starts off",
    "kv_disk_decode": "MODEL --rounds 6",
    "long_bodies": "URL",
    "made_hybrid": "FOLDER/h.gguf --layers 4 --vocabulary 512",
    "made_llama": "FOLDER/l.gguf --shape medium",
    "made_mixture": f"FOLDER/m.gguf {_TINY_MIXTURE}",
    "mixtures": "MIXTURE --threads 1 --rounds 3",
    "policies": "URL --text TEXT --prompts 2 --turns 2",
    "router": "URL ROUTER --streams 2 --tokens 8 --rounds 1",
    "serving": "a=URL --record FOLDER/r.jsonl --scenarios single --rounds 1 --warmup 0 "
    "--vocab-size 2048",
    "start": "--rounds 1 --cold-rounds 0",
    "state_drafts": "--layers 4 --rounds 1",
    "step_floors": "--shape medium --layers 1 --threads 1 --rounds 1",
    "streams": "--streams 4 --rates 500 --seconds 0.5 --rounds 1",
    "weights": "MODEL --ways float32,int8 --rounds 2",
}
# They judge the time of a busy machine, and may end with 1 for it.
JUDGES = {"chat_templates": "added at the median"}
# Tests of their own run them, in this folder.
TESTED = {
    *("gpu_attention", "gpu_model", "gpu_needs", "make_model", "peer_weights"),
    "transformers_server",
}
NOT_RUN = {
    # Parts of others.
    *("gpu_contenders", "stream_server"),
    # They need llama.cpp.
    *("kv_disk_peer", "mixture_peer", "mixtures_beside"),
    "peer_kv_cache",
}


@pytest.fixture(scope="module")
def router(server: Server) -> Iterator[Server]:
    with running_server(server.url, subcommand="route") as running:
        yield running


@pytest.fixture(scope="module")
def places(
    server: Server, router: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("benchmarks")
    text = folder / "text"
    text.write_text("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    mixture = folder / "mixture.gguf"
    assert run("made_mixture", f"{mixture} {_TINY_MIXTURE}".split()).returncode == 0
    windows = next(each for each in CASES if each.name == "gemma3").write(folder / "windows.gguf")
    return {
        "MODEL": str(EMBEDDED_MODEL),
        "MIXTURE": str(mixture),
        "WINDOWS": str(windows),
        "TEXT": str(text),
        "URL": server.url,
        "ROUTER": router.url,
    }


def run(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("module", RUNS)
def test_a_benchmark_runs(module: str, places: dict[str, str], tmp_path: Path) -> None:
    """It prints something, and its code is 0."""
    arguments = RUNS[module].replace("FOLDER", str(tmp_path))
    for word, place in places.items():
        arguments = arguments.replace(word, place)
    ended = run(module, arguments.split())
    if ended.returncode == 1 and module in JUDGES:
        assert JUDGES[module] in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.strip()


def test_each_benchmark_is_run_here_or_elsewhere() -> None:
    """A new one needs a line."""
    commands = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert commands == {*RUNS, *TESTED, *NOT_RUN}
    for name in TESTED:
        assert (Path(__file__).parent / f"test_{name}.py").is_file()
