"""The structure of the project, kept by tests."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable
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


_RUNTIME = (
    "engine",
    "loading",
    "runner",
    "scheduling",
    "layers",
    "attention",
    "cache",
    "text",
    "tools",
)
# folder -> folders of the same package that its files may import; each may import the root's files
ROOMS = {
    "model_runtime": {
        "cpu_kernels": set(),
        "gguf": set(),
        "quantised": set(),
        "text": set(),
        "tools": {"text"},
        "cache": {"cpu_kernels"},
        "attention": {"cache", "cpu_kernels"},
        "probing": {"attention", "cache"},
        "layers": {"probing", "attention", "cache", "cpu_kernels"},
        "gpu_layers": {"layers", "probing", "attention", "cache"},
        "scheduling": {"cache"},
        "speculation": set(),
        "runner": {"layers", "attention", "cache", "cpu_kernels"},
        "hub": {"loading"},
        "loading": {"gguf", "quantised", "runner", "layers", "attention", "cache", "text"}
        | {"cpu_kernels", "gpu_layers", "probing"},
        "parallel": {"loading", "probing", "runner", "layers", "attention", "cache", "cpu_kernels"},
        "engine": {*_RUNTIME, "cpu_kernels", "speculation"},
    },
    "server": {
        "study": set(),
        "bench": {"study"},
        "corpus": set(),
        "terminal": set(),
        "access": set(),
        "reference": set(),
        "middleware": {"access"},
        "settings": set(),
        "api": {"access", "middleware", "settings"},
        "startup": {"access", "page", "api", "middleware", "settings"},
        "replicas": {"access", "api", "startup", "middleware", "settings"},
        "ray": {"replicas", "access", "api", "startup", "middleware", "settings"},
        "doctor": {"startup", "settings"},
        "inspection": {"study", "startup", "settings", "corpus"},
        "policy_eval": {"study", "startup", "settings", "corpus"},
        "evaluation": {"policy_eval", "study", "startup", "settings", "corpus"},
        "playground": {"page", "api", "corpus", "settings"},
        "page": {"settings"},
    },
}
# Deciding is plain Python: no torch in these.
TORCHLESS = ("model_runtime/scheduling",)
TORCHLESS_CACHE = ("page_pool.py", "prefix_cache.py")
MOST_FILES = 15  # of a folder, `__init__` not counted
MOST_LINES_WITHOUT_DOCSTRING = 3  # of the body of a public function


def modules(path: Path) -> set[str]:
    """Full names of the modules that a file imports, or imports names of."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports."""
    return {name.partition(".")[0] for name in modules(path)}


@pytest.mark.parametrize("package", ROOMS)
def test_folders_import_what_their_table_says(package: str) -> None:
    """A file imports its own folder, the package's root and the folders below it."""
    rooms = ROOMS[package]
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(rooms)
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        room = path.relative_to(ROOT / package).parts[0]
        if room not in rooms:
            continue
        for name in modules(path):
            head, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if head == package and other in rooms and other not in {room, *rooms[room]}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


# folder inside a folder -> what its files may import, beside their own folder
INNER = {
    "rope/positions": {"rope.errors", "rope.words", "rope.positions"},
    "model_runtime/cpu_kernels/ranges": {"ropewalk.model_runtime.cpu_kernels"},
    "model_runtime/cpu_kernels/experts": {"ropewalk.model_runtime.cpu_kernels"},
    "server/api/fields": {"ropewalk.server.api", "ropewalk.server.api.strict_body"},
    "server/evaluation/tasks": {"ropewalk.studies.ruler", "ropewalk.studies.harness.eval_run"},
    "model_runtime/cpu_kernels/low_bits": {"ropewalk.model_runtime.cpu_kernels"},
    "model_runtime/layers/experts": {
        *(
            "ropewalk.model_runtime.cpu_kernels",
            "ropewalk.model_runtime.layers",
            "ropewalk.model_runtime.probing",
        ),
    },
    "model_runtime/layers/low_bits": {
        "ropewalk.model_runtime.cpu_kernels",
        "ropewalk.model_runtime.layers",
    },
    "model_runtime/loading/low_bits": {
        "ropewalk.model_runtime.cpu_kernels",
        "ropewalk.model_runtime.errors",
        "ropewalk.model_runtime.formats",
        "ropewalk.model_runtime.layers",
        "ropewalk.model_runtime.loading",
        "ropewalk.model_runtime.probing",
        "ropewalk.model_runtime.formats",
    },
    "model_runtime/attention/triton": {
        *(
            "ropewalk.model_runtime.attention",
            "ropewalk.model_runtime.attention",
            "ropewalk.model_runtime.attention.batch",
        ),
        *("ropewalk.model_runtime.attention.work_list", "ropewalk.model_runtime.transfer"),
    },
}


@pytest.mark.parametrize("folder", INNER)
def test_an_inner_folder_is_small_and_imports_what_its_table_says(folder: str) -> None:
    """It says what is in it, too."""
    paths = sorted((ROOT / folder).glob("*.py"))
    assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert 1 < len(paths) <= MOST_FILES + 1
    own = folder.partition("/")[0]
    for path in paths:
        names = {name for name in modules(path) if name.partition(".")[0] == own}
        assert all(name.startswith(tuple(INNER[folder])) for name in names), path.name


@pytest.mark.parametrize("package", ROOMS)
def test_each_folder_says_what_is_in_it_and_is_small(package: str) -> None:
    """A reader looks at a dozen names at a time."""
    for room in ROOMS[package]:
        folder = ROOT / package / room
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), room
        assert len(list(folder.glob("*.py"))) - 1 <= MOST_FILES, room


def test_deciding_is_plain_python() -> None:
    """The scheduler, the page pool and the prefix cache know no torch."""
    paths = [ROOT / "model_runtime/request.py", *(ROOT / TORCHLESS[0]).glob("*.py")]
    paths += [ROOT / "model_runtime/cache" / name for name in TORCHLESS_CACHE]
    assert len(paths) > 5
    assert not [path.name for path in paths if "torch" in imported(path)]


def offenders(paths: Iterable[Path], is_wrong: Callable[[Path], bool]) -> list[str]:
    """Names of the files that break a rule."""
    return [str(path.relative_to(ROOT)) for path in paths if is_wrong(path)]


def test_imports_point_one_way() -> None:
    """Server imports model_runtime, which imports rope; rope uses torch and the stdlib only."""

    def is_wrong(path: Path) -> bool:
        names, package = imported(path), path.relative_to(ROOT).parts[0]
        known = {"rope", "torch", *sys.stdlib_module_names} if package == "rope" else names
        return not names & set(PACKAGES) <= MAY_IMPORT[package] or not names <= known

    assert not offenders(SOURCES, is_wrong)


def test_files_are_short() -> None:
    """A file has at most 350 lines."""
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    assert not offenders(paths, lambda path: len(path.read_text().splitlines()) > 350)


def untold_functions(path: Path) -> list[str]:
    """Public functions and methods of a file that are long and have no docstring."""
    found = []
    scopes: list[ast.Module | ast.ClassDef] = [ast.parse(path.read_text())]
    for scope in scopes:
        public = [node for node in scope.body if not getattr(node, "name", "_").startswith("_")]
        scopes += [node for node in public if isinstance(node, ast.ClassDef)]
        for node in public:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                if num_lines > MOST_LINES_WITHOUT_DOCSTRING and not ast.get_docstring(node):
                    found.append(f"{path.relative_to(ROOT)}: {node.name}")
    return found


def test_a_name_tells_a_short_function_only() -> None:
    """Ruff's D102 and D103 know no lengths, so they are off."""
    found = [name for path in SOURCES for name in untold_functions(path)]
    assert not found, "\n".join(found)


def test_files_are_named_for_what_is_in_them() -> None:
    """No file is called utils, common, helpers, misc or base."""
    vague = {"utils", "common", "helpers", "misc", "base"}
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    assert not offenders(paths, lambda path: path.stem in vague)


def test_nothing_is_unpickled() -> None:
    """Neither pickle nor a package based on it is used, because such data may run code."""
    unsafe = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    assert not offenders(
        SOURCES, lambda path: bool(imported(path) & unsafe) or "torch.load" in path.read_text()
    )


def test_a_foreign_rope_is_noticed(tmp_path: Path) -> None:
    """Another project's package of the same name comes earlier on the path."""
    (tmp_path / "rope").mkdir()
    (tmp_path / "rope" / "__init__.py").write_text("")
    first = [str(tmp_path), str(ROOT)]
    code = f"import sys; sys.path[:0] = {first}; from ropewalk.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert f"Python finds the package 'rope' at {tmp_path / 'rope'}" in ended.stderr
    assert "virtual environment of its own" in ended.stderr


def test_the_public_names_of_rope_are_sorted_and_exist() -> None:
    """`__all__` has constants first, then the other names."""

    assert rope.__all__ == sorted(rope.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(rope, name) for name in rope.__all__)
