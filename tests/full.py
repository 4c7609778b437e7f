"""Run every test with whole matrices, part by part: `python -m tests.full [PART...]`.

Each part says its time. A change owes the parts that CONTRIBUTING.md names.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Part -> files and folders below tests/. A file belongs to the part with the longest of its paths.
PATHS = {
    "parallel": ("model_runtime/parallel",),
    "attention": ("model_runtime/attention", "model_runtime/gpu", "gpu"),
    "kernels": ("model_runtime/cpu_kernels", "model_runtime/layers"),
    "models": ("model_runtime/loading", "model_runtime/probing"),
    "bits": ("model_runtime/formats", "model_runtime/layers/low_bits"),
    "runtime": ("model_runtime", "rope", "promises", "training"),
    "server": ("server", "studies", "playground"),
    "docker": ("docker",),
    "commands": ("test_doc_commands.py", "benchmarks"),
    "real": ("real",),
    "rules": ("",),
}
PYTEST = (sys.executable, "-m", "pytest", "--durations=20")
_BESIDE = (
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
    *("-m", "not alone and not ray"),
)
NO_TESTS = 5  # pytest's exit code when all tests were deselected


def part_of(path: Path) -> str:
    """Return the part of a file of tests, which is relative to tests/."""
    found, longest = "", -1
    for part, roots in PATHS.items():
        for root in map(Path, roots):
            if path.is_relative_to(root) and len(root.parts) > longest:
                found, longest = part, len(root.parts)
    return found


def files_of(part: str) -> list[str]:
    """Return the files of a part, relative to the root."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in files
        if part_of(file.relative_to(ROOT / "tests")) == part
    ]


def commands() -> dict[str, Sequence[str]]:
    """Return what runs each part. Those of `real` and `alone` need all cores."""
    beside = {part: (*PYTEST, *_BESIDE, *files_of(part)) for part in PATHS}
    return {
        **beside,
        "real": (*PYTEST, *files_of("real")),
        "alone": (*PYTEST, "-m", "alone and not real", "tests"),
        "ray": ("make", "test-ray"),
    }


def run(part: str, command: Sequence[str]) -> tuple[bool, float]:
    """Run a part; return whether it passed, and its seconds."""
    variables = {"SAMPLE": "all"}
    if part not in {"real", "alone"}:
        variables["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False)
    return code.returncode in {0, NO_TESTS}, time.monotonic() - began


def main() -> None:
    """Run the parts that are named, or all of them, and exit with 1 if one failed."""
    known = commands()
    wanted = sys.argv[1:] or list(known)
    unknown = set(wanted) - set(known)
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    lines, has_failed = [], False
    for part in wanted:
        has_passed, seconds = run(part, known[part])
        has_failed |= not has_passed
        lines.append(f"{part:<10} {seconds:5.0f} s  {'passed' if has_passed else 'FAILED'}")
        sys.stdout.write(f"part {lines[-1]}\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(["", *lines, ""]))
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
