"""The scripts of a run on a GPU: every line runs, and none can spoil another."""

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks/gpu/runs"
MOST_S = 600  # of one script


def run(script: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run a script at sizes for Triton's interpreter."""
    environment = {
        **os.environ,
        "TINY": "1",
        "OUT": str(out),
        "COMMIT": "abc123",
        "PYTHON": str(ROOT / ".venv/bin/python"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["/bin/bash", str(script)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def said(script: Path) -> list[tuple[str, int]]:
    """The name and the limit in seconds of each line."""
    found = re.findall(r"^say (\w+) (\d+) ", script.read_text(), re.MULTILINE)
    return [(name, int(limit)) for name, limit in found]


@pytest.mark.parametrize("name", ["1.sh", "2.sh", "3.sh"])
def test_the_limits_of_the_lines_fit_a_command(name: str) -> None:
    """Even if every line takes all of its time. Names are those of files, so each is used once."""
    lines = said(FOLDER / name)
    assert lines
    assert sum(limit for _, limit in lines) <= MOST_S
    assert len({line for line, _ in lines}) == len(lines)


def test_a_line_that_fails_or_hangs_costs_itself_only(tmp_path: Path) -> None:
    """The output of other lines comes back, in two files."""
    script = tmp_path / "run.sh"
    script.write_text(
        ". benchmarks/gpu/runs/env.sh\n"
        'say good 20 bash -c "echo one; echo two > $RESULTS/kept.txt"\n'
        "say bad 20 false\n"
        "say hangs 1 sleep 100\n"
        "say last 20 echo three\n"
    )
    out = tmp_path / "out"
    ended = run(script, out)
    assert ended.returncode == 0, ended.stderr
    codes = re.findall(r"== (\w+): code (\d+)", ended.stdout)
    assert codes == [("good", "0"), ("bad", "1"), ("hangs", "124"), ("last", "0")]
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.tar.gz"]
    assert "three" in (out / "log.txt").read_text()
    with tarfile.open(out / "results.tar.gz") as packed:
        assert {"./kept.txt", "./good.txt", "./hangs.txt"} <= set(packed.getnames())


@pytest.mark.skipif("GPU_RUNS" not in os.environ, reason="minutes; GPU_RUNS=1 runs it")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["1.sh", "2.sh", "3.sh"])
def test_every_line_of_a_run_works(name: str, tmp_path: Path) -> None:
    """Cases that need CUDA skip themselves, which is no failure."""
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    ended = run(FOLDER / name, tmp_path)
    codes = dict(re.findall(r"== (\w+): code (\d+)", ended.stdout))
    failed = {line: code for line, code in codes.items() if code != "0"}
    assert not failed, ended.stdout[-3000:]
    assert set(codes) == {line for line, _ in said(FOLDER / name)}
