"""The table of mutants follows the files, and a test that fails anyway notices no fault."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import drawn, mutants_of
from tests.mutation_targets import ROOT, TARGETS, Target


def test_each_target_has_files_faults_and_tests() -> None:
    """A module or a file of tests that moves has to move here, too."""
    for name, target in TARGETS.items():
        assert any(mutants_of(file, name) for file in target.files())
        assert [each for each in target.tests if not (ROOT / each).exists()] == []


def test_no_file_is_drawn_by_two_targets() -> None:
    """Else a file would be drawn twice as often."""
    files = [file for target in TARGETS.values() for file in target.files()]
    assert len(files) == len(set(files))


def test_a_pattern_without_a_file_is_refused() -> None:
    """The message names it."""
    with pytest.raises(ValueError, match=r"no file matches 'gone/\*\.py'"):
        Target(("rope/*.py", "gone/*.py"), ()).files()


def test_a_mutant_differs_from_its_file_in_one_place() -> None:
    """Each target gives the same number, and a seed repeats them."""
    mutants = drawn(4, seed=3, only="^(rope|windows)$")
    assert mutants == drawn(4, seed=3, only="^(rope|windows)$")
    assert sorted(each.target for each in mutants) == ["rope", "rope", "windows", "windows"]
    for mutant in mutants:
        tree = ast.parse((ROOT / mutant.path).read_text())
        before, after = ast.unparse(tree).splitlines(), mutant.text().splitlines()
        assert len(before) == len(after)
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


VERDICTS = """
from pathlib import Path
from tests.mutants import Judge
judge = Judge(Path.cwd(), 60)
for fault, tests in (
    ("def double(x): return x * 3", "test_it.py"),
    ("def double(x): return x + x", "test_it.py"),
    ("def double(x): return x * 3", "test_red.py"),
    ("def double(x): return", "test_it.py::test_two"),
):
    print(*judge.verdict("it.py", fault, [tests]))
"""


def test_a_fault_is_told_from_a_test_that_fails_anyway(tmp_path: Path) -> None:
    """The file has its own text again afterwards."""
    original = "def double(x): return x * 2"
    (tmp_path / "it.py").write_text(original)
    (tmp_path / "test_it.py").write_text("from it import *\ndef test_two(): assert double(2) == 4")
    options = "addopts = -p no:langsmith_plugin -p no:schemathesis"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{options}")
    (tmp_path / "test_red.py").write_text("def test_red(): assert False")
    ended = subprocess.run(
        [sys.executable, "-c", VERDICTS],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.splitlines() == [
        "noticed test_it.py::test_two",
        "MISSED ",
        "unclear test_red.py::test_red fails without the fault, too",
        "noticed test_it.py::test_two",
    ]
    assert (tmp_path / "it.py").read_text() == original
