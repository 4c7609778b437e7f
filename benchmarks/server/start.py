"""How long commands take to begin, from another process: `python -m benchmarks.server.start`.

Each command runs in a new interpreter. A number is the median of `--rounds` runs, in seconds. The
second column counts the seconds of a processor, which other work on the machine changes little.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.server.own_server import completion_status, free_port

_START_S = 300.0
_PAUSE_S = 0.005  # between two attempts to connect
_EMBEDDED = Path(__file__).parents[2] / "ropewalk" / "model_runtime" / "embedded_model"
_BODY = json.dumps({"prompt": "def ", "max_tokens": 1})


class Times(NamedTuple):
    """The seconds of one run."""

    wall_s: float
    processor_s: float


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-rounds", type=int, default=1, help="starts that compile kernels")
    parser.add_argument("--module", default="ropewalk", help="`server` measures older releases")
    parsed = parser.parse_args()
    sys.stdout.write("| command | seconds | of a processor |\n|---|---:|---:|\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_commands(folder, parsed.module, parsed.rounds)
        measure_starts(folder, parsed.module, parsed.rounds, parsed.cold_rounds)


def measure_commands(folder: Path, module: str, rounds: int) -> None:
    """Measure the commands that end by themselves."""
    (folder / "ok.yaml").write_text("max_num_seqs: 8\n")
    (folder / "wrong.yaml").write_text("max_num_sqs: 8\n")
    shutil.copytree(_EMBEDDED, folder / "model")
    for arguments in (
        ("--version",),
        ("--help",),
        ("config", "check", "wrong.yaml"),
        ("config", "check", "ok.yaml"),
        ("inspect", "model"),
    ):
        command = [sys.executable, "-m", module, *arguments]
        ended(command, folder)  # the first run fills caches
        _write(f"`{shlex.join(('ropewalk', *arguments))}`", _many(command, folder, rounds))


def measure_starts(folder: Path, module: str, rounds: int, cold_rounds: int) -> None:
    """Measure starts of the embedded model on one thread, warm and with an empty kernel cache."""
    cache = folder / "kernels"
    environment = _environment() | {"NUMBA_CACHE_DIR": str(cache)}
    cold: list[tuple[Times, Times]] = []
    for _ in range(cold_rounds):
        shutil.rmtree(cache, ignore_errors=True)
        cold.append(started(module, environment))
    warm = [started(module, environment) for _ in range(rounds)]
    for name, found in (("warm", warm), ("empty", cold)):
        if not found:
            continue
        for what, values in zip(
            ("first 503", "first answer"), zip(*found, strict=True), strict=True
        ):
            _write(f"`ropewalk serve --threads 1`, {name} kernel cache, {what}", list(values))


def ended(command: list[str], folder: Path) -> Times:
    """Return the times until a command has ended."""
    began, before = time.monotonic(), _of_children()
    subprocess.run(  # noqa: S603  # our own command
        command, cwd=folder, env=_environment(), capture_output=True, check=False
    )
    return Times(time.monotonic() - began, _of_children() - before)


def started(module: str, environment: dict[str, str]) -> tuple[Times, Times]:
    """Return the times until a server's first answer of any kind, and until its first token."""
    port = free_port()
    began = time.monotonic()
    process = subprocess.Popen(  # noqa: S603  # our own command
        [sys.executable, "-m", module, "serve", "--port", str(port), "--threads", "1"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    first = None
    try:
        while time.monotonic() - began < _START_S:
            status = completion_status(port, _BODY, 60)
            now = Times(time.monotonic() - began, cpu_seconds(process.pid))
            if status is not None and first is None:
                first = now
            if status == 200 and first is not None:
                return first, now
            time.sleep(_PAUSE_S if first is None else 10 * _PAUSE_S)
        raise TimeoutError("the server does not answer")
    finally:
        process.terminate()
        process.wait(60)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def _many(command: list[str], folder: Path, rounds: int) -> list[Times]:
    return [ended(command, folder) for _ in range(rounds)]


def _write(name: str, found: list[Times]) -> None:
    cells = [
        f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for values in ([each.wall_s for each in found], [each.processor_s for each in found])
    ]
    sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(pid: int) -> float:
    """Return the time that a process has run on processors."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
