"""The shape of the project, kept by a machine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rope", "model_runtime", "server", "training", "benchmarks")
# package -> packages of ours it may import
MAY_IMPORT = {
    "rope": {"rope"},
    "model_runtime": {"model_runtime", "rope"},
    "server": {"server", "model_runtime", "rope"},
    "training": {"training", "server"},  # of server: which text is held out, how needles look
    # of server: the client; of training: the tokenizer; the attention is measured by itself
    "benchmarks": {"benchmarks", "server", "training", "model_runtime", "rope"},
}
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    """server -> model_runtime -> rope; rope knows torch and the standard library"""
    names = imported(path)
    package = path.relative_to(ROOT).parts[0]
    assert names & set(PACKAGES) <= MAY_IMPORT[package]
    if package == "rope":
        assert names <= {"rope", "torch", *sys.stdlib_module_names}
    if path.name in ("scheduler.py", "page_pool.py", "sequence.py", "request.py"):
        assert "torch" not in names, "deciding is plain Python"


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_are_short_and_named_for_what_is_in_them(path: Path) -> None:
    """at most 350 lines; no utils, common, helpers, misc or base"""
    assert len(path.read_text().splitlines()) <= 350
    assert path.stem not in {"utils", "common", "helpers", "misc", "base"}


def test_a_foreign_rope_is_noticed(tmp_path: Path) -> None:
    """another project's package of the same name, earlier on the path"""
    (tmp_path / "rope").mkdir()
    (tmp_path / "rope" / "__init__.py").write_text("")
    first = [str(tmp_path), str(ROOT)]
    code = f"import sys; sys.path[:0] = {first}; from server.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert f"Python finds the package 'rope' at {tmp_path / 'rope'}" in ended.stderr
    assert "virtual environment of its own" in ended.stderr


def test_the_public_names_of_rope_are_sorted_and_exist() -> None:
    """one list"""
    import rope

    assert rope.__all__ == sorted(rope.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(rope, name) for name in rope.__all__)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    """neither by pickle nor by what rests on it: loading such data runs code"""
    names = imported(path)
    assert not names & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    assert "torch.load" not in path.read_text()
