"""Count which small faults the tests notice: `python -m tests.mutants [--num 60] [--only PATTERN]`.

Each mutant changes one operator or number of one file, in a copy of the tree, and the tests of that
file run until the first one fails. A mutant that no test notices is a line without a test, or a
change without a meaning; a person has to look. Not part of any suite, because it takes an hour.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_API = "tests/server/api"
_PROMISES = "tests/promises/test_batch_invariance.py"
_ENGINE = ("tests/model_runtime/engine", _PROMISES)
# Files whose faults are drawn -> the tests that `make test` has for them, nearest first.
TARGETS: dict[str, tuple[str, ...]] = {
    "model_runtime/scheduling/*.py": ("tests/model_runtime/scheduling", *_ENGINE),
    "model_runtime/scheduling/page_pool.py": ("tests/model_runtime/scheduling", *_ENGINE),
    "model_runtime/scheduling/prefix_cache.py": ("tests/model_runtime/scheduling", *_ENGINE),
    "model_runtime/runner/sampler.py": ("tests/model_runtime/runner", _API),
    "model_runtime/runner/ranked_draw.py": ("tests/model_runtime/runner", _API),
    "rope/*.py": ("tests/rope",),
    "model_runtime/deployments/deployment.py": ("tests/model_runtime/deployments", _API),
    "model_runtime/attention/cpu_*.py": ("tests/model_runtime/attention", _PROMISES),
    "model_runtime/layers/packed_*.py": ("tests/model_runtime/layers", _PROMISES),
    "server/api/service.py": (_API,),
    "server/api/*_schema.py": (_API,),
    "model_runtime/scheduling/draft*.py": ("tests/model_runtime/scheduling", *_ENGINE),
    "server/replicas/*.py": ("tests/server/replicas",),
    "model_runtime/formats/quantised_*.py": ("tests/model_runtime/formats",),
    "model_runtime/formats/gguf_*.py": (
        "tests/model_runtime/formats",
        "tests/model_runtime/layers/low_bits",
    ),
    "model_runtime/engine/memory/memory_profile.py": ("tests/model_runtime/engine",),
    "studies/doctor/*.py": ("tests/studies/doctor",),
    "studies/inspection/*.py": ("tests/studies/inspection",),
    "server/page/docs_page.py": ("tests/server/page",),
    "server/startup/loading_answers.py": ("tests/server/startup",),
}
_RUN_S = 900
_NO_TEST = 5  # pytest's exit code when none was collected
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One fault: the file, the line, and the file's text with the fault."""

    path: str
    line: int
    change: str
    text: str
    tests: tuple[str, ...]


def _changed(node: ast.AST) -> Iterator[str]:
    """Change a node in place, one way at a time; yield how, and change it back."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        before = node.ops[0]
        node.ops[0] = _COMPARED[type(before)]()
        yield "comparison"
        node.ops[0] = before
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        operator = node.op
        node.op = _COMPUTED[type(operator)]()
        yield "arithmetic"
        node.op = operator
    elif isinstance(node, ast.BoolOp):
        joined = node.op
        node.op = ast.Or() if isinstance(joined, ast.And) else ast.And()
        yield "and/or"
        node.op = joined
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
        node.value = number + 1
        yield f"{number} + 1"
        node.value = number
    elif isinstance(node, ast.IfExp | ast.If):
        test = node.test
        node.test = ast.UnaryOp(ast.Not(), test)
        yield "condition"
        node.test = test


def mutants_of(path: Path, tests: tuple[str, ...]) -> list[Mutant]:
    """Return every mutant of a file, as text without comments."""
    tree = ast.parse(path.read_text())
    original = ast.unparse(tree)
    found = []
    for node in ast.walk(tree):
        for change in _changed(node):
            text = ast.unparse(ast.fix_missing_locations(tree))
            if text != original:
                line = getattr(node, "lineno", 0)
                found.append(Mutant(str(path.relative_to(ROOT)), line, change, text, tests))
    return found


def drawn(num: int, seed: int, only: str = "") -> list[Mutant]:
    """Return mutants, the same number of each target whose pattern matches where it has them."""
    source = random.Random(seed)
    by_target = []
    for pattern, tests in TARGETS.items():
        if not re.search(only, pattern):
            continue
        files = [each for each in sorted(ROOT.glob(pattern)) if each.name != "__init__.py"]
        mutants = [mutant for file in files for mutant in mutants_of(file, tests)]
        source.shuffle(mutants)
        by_target.append(mutants)
    rounds = [mutants[at] for at in range(num) for mutants in by_target if at < len(mutants)]
    return rounds[:num]


def _copy(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607  # whichever one the developer uses
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def is_noticed(folder: Path, mutant: Mutant) -> tuple[bool, str]:
    """Run the tests on the copy with the fault; return whether one failed, and which."""
    file = folder / mutant.path
    original = file.read_text()
    file.write_text(mutant.text)
    tests = [each for each in mutant.tests if (folder / each).exists()]
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:randomly",
        "-p", "no:cacheprovider", "-m", "not alone and not long and not ray and not real", *tests,
    ]  # fmt: skip
    try:
        ended = subprocess.run(
            command, cwd=folder, env={**os.environ, "SAMPLE_SEED": "0"},
            capture_output=True, text=True, check=False, timeout=_RUN_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, "it did not end"
    finally:
        file.write_text(original)
    assert ended.returncode != _NO_TEST, ended.stdout
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ended.returncode != 0, (failed or ended.stdout.splitlines()[-1:] or [""])[0]


def main() -> None:
    """Print a line for each mutant, and how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression of the targets' patterns")
    parser.add_argument("--tests", type=Path, help="a folder of tests to run instead of tests/")
    parser.add_argument("--record", type=Path, default=Path("build/mutants.jsonl"))
    asked = parser.parse_args()
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    mutants = drawn(asked.num, asked.seed, asked.only)
    num_noticed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, asked.record.open("a") as record:
        folder = Path(name)
        _copy(folder)
        if asked.tests is not None:
            shutil.rmtree(folder / "tests")
            shutil.copytree(asked.tests, folder / "tests")
        for mutant in mutants:
            began = time.monotonic()
            noticed, last = is_noticed(folder, mutant)
            num_noticed += noticed
            row = {
                "path": mutant.path, "line": mutant.line, "change": mutant.change,
                "noticed": noticed, "by": last, "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            record.write(json.dumps(row) + "\n")
            record.flush()
            sys.stdout.write(f"{'noticed' if noticed else 'MISSED '} {json.dumps(row)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{num_noticed} of {len(mutants)} noticed\n")


if __name__ == "__main__":
    main()
