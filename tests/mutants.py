"""Count which small faults the tests notice: `python -m tests.mutants [--num 60] [--only PATTERN]`.

Each mutant changes one operator or number of one file, in a copy of the tree under build/mutants.
The tests that are nearest to that file run until the first one fails. A fault is noticed if that
test passes without it. A mutant that no test notices is a line without a test, or a change without
a meaning; a person has to look. Not part of any suite, because it takes half an hour.
"""

import argparse
import ast
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.mutation_targets import ROOT, TARGETS

_MARKS = "not alone and not long and not ray and not real"
_NOT_RUN = 99  # an exit code that pytest has not
_TEST_S = 60  # a test that takes longer than this does not end
# Imported once, before the forks that run the tests.
_LARGE = (
    *("torch", "numba", "transformers.models.llama.modeling_llama", "fastapi", "openai"),
    *("hypothesis.strategies", "structlog", "anyio.pytest_plugin", "xdist.plugin", "httpx"),
)
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One fault: its target, the file, the line, and the changes of the file that come before."""

    target: str
    path: str
    line: int
    change: str
    number: int

    def source(self, folder: Path = ROOT) -> str:
        """Return the line without the fault."""
        return (folder / self.path).read_text().splitlines()[self.line - 1].strip()

    def text(self, folder: Path = ROOT) -> str:
        """Return the file's text in a copy with the fault, and without comments."""
        tree = ast.parse((folder / self.path).read_text())
        for number, _ in enumerate(_changes(tree)):
            if number == self.number:
                return ast.unparse(ast.fix_missing_locations(tree))
        raise ValueError(f"{self.path} has no change {self.number}")


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


def _changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for change in _changed(node):
            yield getattr(node, "lineno", 1), change


def mutants_of(path: Path, target: str) -> list[Mutant]:
    """Return every mutant of a file."""
    name = str(path.relative_to(ROOT))
    changes = enumerate(_changes(ast.parse(path.read_text())))
    return [Mutant(target, name, line, change, number) for number, (line, change) in changes]


def drawn(num: int, seed: int, only: str = "") -> list[Mutant]:
    """Return mutants, the same number of each target whose name matches where it has them."""
    by_target = []
    for name in [each for each in TARGETS if re.search(only, each)]:
        mutants = [each for file in TARGETS[name].files() for each in mutants_of(file, name)]
        random.Random(f"{seed} {name}").shuffle(mutants)
        by_target.append(mutants)
    rounds = [mutants[at] for at in range(num) for mutants in by_target if at < len(mutants)]
    return rounds[:num]


def _copy(folder: Path) -> None:
    """Bring the copy up to date; it keeps the compiled kernels, which are found by their folder."""
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607  # whichever one the developer uses
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for file in [each for each in folder.rglob("*") if each.is_file() or each.is_symlink()]:
        name = str(file.relative_to(folder))
        if name not in listed and file.suffix not in (".pyc", ".nbi", ".nbc"):
            file.unlink()
    for name in listed:
        ours, copied = ROOT / name, folder / name
        is_link = ours.is_symlink()  # the packages at the top
        if not ours.exists() or (is_link and copied.is_symlink()):
            continue
        if not is_link and copied.exists() and ours.read_bytes() == copied.read_bytes():
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ours, copied, follow_symlinks=False)


class _FirstFailure:
    """Tells pytest's first failure to a file."""

    def __init__(self, told: Path) -> None:
        self._told = told

    def _tell(self, report: Any) -> None:
        if report.failed and not self._told.exists():
            self._told.write_text(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of a test, its set-up or its end."""
        self._tell(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell of a file that cannot be imported."""
        self._tell(report)


def _become_pytest(folder: Path, tests: Sequence[str], told: Path, out: int) -> None:
    """Run tests in this fork, as a process of its own in the copy, and end."""
    code = _NOT_RUN
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *(each for each in sys.path if each not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(folder)
        # A file's bytecode is known by its second and its size, which a mutant may share.
        sys.dont_write_bytecode = True
        options = ["-x", "-q", "--no-header", "--tb=short", "-m", _MARKS, f"--timeout={_TEST_S}"]
        # The parent has imported packages that are pytest's plugins, too.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        plugins = [*quiet, "-p", "no:randomly", "-p", "no:cacheprovider"]
        code = pytest.main([*options, *plugins, *tests], plugins=[_FirstFailure(told)])
    except BaseException:  # noqa: BLE001  # a fork must not go on as the parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def first_failure(folder: Path, tests: Sequence[str], limit_s: float) -> str | None:
    """Run tests in the copy; return the name of the first that fails, or None.

    Raises TimeoutError if they take longer than the limit, RuntimeError if they could not be run.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, tempfile.TemporaryFile() as out:
        told = Path(name) / "told"
        pid = os.fork()
        if pid == 0:
            _become_pytest(folder, tests, told, out.fileno())
        ends = time.monotonic() + limit_s
        ended, status = os.waitpid(pid, os.WNOHANG)
        while not ended and time.monotonic() < ends:
            time.sleep(0.05)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError
        if told.exists():
            return told.read_text()
        out.seek(0)
        said = out.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        raise RuntimeError(said)
    return f"signal {-code}" if code else None


class Judge:
    """Says of mutants whether the tests notice them, in a copy of the tree."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder = folder
        self._limit_s = limit_s
        self._sound = set[str]()  # tests that have passed without a fault

    def verdict(self, path: str, text: str, tests: Sequence[str]) -> tuple[str, str]:
        """Return "noticed", "MISSED" or "unclear" for a file's text, and the test that noticed."""
        file = self._folder / path
        original = file.read_text()
        file.write_text(text)
        try:
            failed = first_failure(self._folder, tests, self._limit_s)
        except TimeoutError:
            return "unclear", f"the tests take longer than {self._limit_s:.0f} s"
        finally:
            file.write_text(original)
        if failed is None:
            return "MISSED", ""
        if failed.startswith("signal"):
            return "noticed", failed
        if failed not in self._sound and self._fails(failed):
            return "unclear", f"{failed} fails without the fault, too"
        self._sound.add(failed)
        return "noticed", failed

    def _fails(self, test: str) -> bool:
        """Run one test without the fault; one that ends with an error of pytest fails, too."""
        try:
            return first_failure(self._folder, [test], self._limit_s) is not None
        except (RuntimeError, TimeoutError):
            return True


def main() -> None:
    """Print a line for each mutant, and how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression of the targets' names")
    parser.add_argument("--seconds", type=float, default=60, help="limit of each mutant's tests")
    parser.add_argument(
        "--record", type=Path, default=ROOT / "build/mutants.jsonl",
        help="a file of verdicts; a mutant that has one is not judged again",
    )  # fmt: skip
    asked = parser.parse_args()
    lines = asked.record.read_text().splitlines() if asked.record.exists() else []
    known = {(row["path"], row["number"]): row["verdict"] for row in map(json.loads, lines)}
    mutants = drawn(asked.num, asked.seed, asked.only)
    folder = ROOT / "build/mutants/tree"
    folder.mkdir(parents=True, exist_ok=True)
    _copy(folder)
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in _LARGE:
        import_module(name)
    gc.freeze()  # the collections of each fork leave all that alone
    subprocess.run(
        [sys.executable, "-m", "tests.warm_kernels"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True,
    )  # fmt: skip
    judge, count = Judge(folder, asked.seconds), Counter[str]()
    with asked.record.open("a") as record:
        for mutant in mutants:
            before = known.get((mutant.path, mutant.number), "unclear")
            if before != "unclear":
                count[before] += 1
                continue
            began = time.monotonic()
            tests = TARGETS[mutant.target].tests
            verdict, by = judge.verdict(mutant.path, mutant.text(folder), tests)
            count[verdict] += 1
            row = {
                "verdict": verdict, "target": mutant.target, "path": mutant.path,
                "line": mutant.line, "number": mutant.number, "change": mutant.change,
                "source": mutant.source(folder), "by": by,
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            record.write(json.dumps(row) + "\n")
            record.flush()
            sys.stdout.write(f"{json.dumps(row)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(count)} of {len(mutants)} with --seed {asked.seed}\n")


if __name__ == "__main__":
    main()
