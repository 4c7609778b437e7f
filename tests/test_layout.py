"""The structure of the project, kept by tests."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ropewalk import rope
from tests.structure import Graph, folder_of, imports, lines_of, modules, named, rooms_of

ROOT = Path(__file__).resolve().parent.parent
# package -> packages of ours it may import
MAY_IMPORT = {
    "rope": {"rope"},
    "model_runtime": {"model_runtime", "rope"},
    "server": {"server", "model_runtime", "rope"},
    "studies": {"studies", "server", "model_runtime", "rope"},
    "training": {"training", "server"},  # of server: which text is held out, how needles look
    # of training: the tokenizer; the attention is measured by itself
    "benchmarks": {"benchmarks", "studies", "server", "training", "model_runtime", "rope"},
}
PACKAGE = {name: folder_of(ROOT, name) for name in MAY_IMPORT}
SOURCES = [path for folder in PACKAGE.values() for path in sorted(folder.rglob("*.py"))]

_MODEL = {"runner", "layers", "tracing", "probing", "attention", "cpu_kernels"}
# folder -> folders of the same package that its files may import; each may import the root's files
ROOMS: dict[str, dict[str, set[str]]] = {
    "rope": {},
    "model_runtime": {
        "cpu_kernels": set(),
        "formats": set(),
        "text": set(),
        "deployments": set(),
        "scheduling": {"deployments"},
        "attention": {"cpu_kernels"},
        "probing": {"attention", "text"},
        "tracing": {"attention"},
        "layers": {"tracing", "probing", "attention", "cpu_kernels", "formats"},
        "gpu": {"tracing", "layers", "probing", "attention", "formats"},
        "runner": {"gpu", "layers", "attention", "cpu_kernels"},
        "loading": {*_MODEL, "gpu", "formats", "text"},
        "parallel": {*_MODEL, "loading"},
        "engine": {"loading", "runner", "scheduling", "attention", "text"},
    },
    "server": {
        "access": set(),
        "settings": set(),
        "terminal": set(),
        "middleware": {"access"},
        "api": {"middleware", "access", "settings"},
        "turns": {"api", "middleware", "settings"},
        "corpus": set(),
        "playground": {"turns", "api", "middleware", "corpus", "settings"},
        "process": {"settings"},
        "startup": {"playground", "turns", "api", "middleware", "access", "settings", "process"},
        "replicas": set(),
        "router": {"startup", "replicas", "middleware", "access", "settings", "process"},
        "ray": {"router", "startup", "playground", "middleware", "access", "settings", "process"},
    },
    "studies": {
        "harness": set(),
        "doctor": set(),
        "bench": {"harness"},
        "inspection": {"harness"},
        "evaluation": {"harness"},
    },
}


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports."""
    return {name.partition(".")[0] for name in modules(path)}


@cache
def sources() -> dict[str, Path]:
    """The sources by the names of their modules, without `ropewalk`."""
    return named(ROOT, MAY_IMPORT)


@cache
def imports_of_ours() -> Graph:
    return imports(sources())


def offenders(paths: Iterable[Path], is_wrong: Callable[[Path], bool]) -> list[str]:
    """Names of the files that break a rule."""
    return [str(path.relative_to(ROOT)) for path in paths if is_wrong(path)]


@pytest.mark.parametrize("package", ROOMS)
def test_folders_import_what_their_table_says(package: str) -> None:
    """A file imports its own folder, the package's root and the folders below it."""
    rooms = ROOMS[package]
    folders = {each.parent.name for each in PACKAGE[package].glob("*/__init__.py")}
    assert folders == set(rooms)
    wrong = []
    for path in sorted(PACKAGE[package].rglob("*.py")):
        room = path.relative_to(PACKAGE[package]).parts[0]
        for name in modules(path) if room in rooms else ():
            head, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if head == package and other in rooms and other not in {room, *rooms[room]}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count, and those for annotations do not."""
    TopologicalSorter(imports_of_ours()).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("package", ROOMS)
def test_no_import_runs_up(package: str) -> None:
    """The files beside the rooms count, too: a room imports what commands share, and no command."""
    _, num_floors, num_circles, num_up = rooms_of(ROOT, package)
    assert (num_circles, num_up) == (0, 0)
    assert num_floors > 1


@pytest.mark.parametrize(
    ("back", "expected"),
    [("", (2, 3, 0, 0)), ("from ropewalk.server.high import third\n", (2, 0, 1, 1))],
)
def test_what_runs_up_is_counted(tmp_path: Path, back: str, expected: tuple[int, ...]) -> None:
    """A circle of two rooms has no floors, and its side with fewer imports runs up."""
    for name, text in {
        "low/first": back,
        "low/second": '"""Words."""\n\n# A remark.\nNUMBER = 1  # code\n',
        "high/third": "import ropewalk.server.low.second\nfrom ropewalk.server.low import first\n",
        "command": "from ropewalk.server.high.third import x\n",
    }.items():
        path = tmp_path / "server" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert rooms_of(tmp_path, "server") == expected
    kinds = {"docstrings and comments": 2, "blank": 1, "code": 1}
    assert lines_of([tmp_path / "server/low/second.py"]) == kinds


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_file_has_one_docstring(package: str) -> None:
    """A second one in the middle of a file is a second module."""

    def is_wrong(path: Path) -> bool:
        tree = ast.parse(path.read_text())
        texts = [
            node
            for node in tree.body
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ]
        return not ast.get_docstring(tree) or len(texts) > 1

    assert not offenders(PACKAGE[package].rglob("*.py"), is_wrong)


def test_deciding_is_plain_python() -> None:
    """The scheduler, the page pool and the prefix cache know no torch."""
    folder = PACKAGE["model_runtime"]
    paths = [folder / "request.py", *(folder / "scheduling").glob("*.py")]
    assert len(paths) > 5
    assert not [path.name for path in paths if "torch" in imported(path)]


def test_imports_point_one_way() -> None:
    """Server imports model_runtime, which imports rope; rope uses torch and the stdlib only."""

    def is_wrong(path: Path) -> bool:
        names = imported(path)
        package = next(name for name, folder in PACKAGE.items() if path.is_relative_to(folder))
        known = {"rope", "torch", *sys.stdlib_module_names} if package == "rope" else names
        return not names & set(MAY_IMPORT) <= MAY_IMPORT[package] or not names <= known

    assert not offenders(SOURCES, is_wrong)


def test_our_packages_are_imported_as_parts_of_ropewalk() -> None:
    """A second name would be a second copy of each module, with its own classes."""
    bare = {"rope", "model_runtime", "server", "studies"}
    names = "|".join(bare)
    may_be_wrong = re.compile(
        rf"^\s*(from ({names})\b|import [^#\n]*(?<![.\w])({names})\b)", re.MULTILINE
    )

    def is_wrong(path: Path) -> bool:
        text = path.read_text()
        if not may_be_wrong.search(text):  # parsing a thousand files takes seconds
            return False
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.partition(".")[0] in bare for name in names):
                return True
        return False

    assert not offenders([*SOURCES, *(ROOT / "tests").rglob("*.py")], is_wrong)


def test_nothing_is_unpickled() -> None:
    """Neither pickle nor a package based on it is used, because such data may run code."""
    unsafe = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    assert not offenders(
        SOURCES, lambda path: bool(imported(path) & unsafe) or "torch.load" in path.read_text()
    )


def test_foreign_packages_of_our_folders_names_do_not_matter(tmp_path: Path) -> None:
    """PyPI has a package called `rope`, and every installation of python-lsp brings it."""
    for name in ("rope", "server", "model_runtime", "studies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('foreign code ran')\n")
    (tmp_path / "ok.yaml").write_text("max_num_seqs: 8\n")
    first = [str(tmp_path), str(ROOT)]
    code = f"import sys; sys.path[:0] = {first}; from ropewalk.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "config", "check", "ok.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "deployment" in ended.stdout


def test_the_public_names_of_rope_are_sorted_and_exist() -> None:
    """`__all__` has constants first, then the other names."""
    assert rope.__all__ == sorted(rope.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(rope, name) for name in rope.__all__)
