"""`python -m tests.structure [FOLDER]`: the counts of a checkout's structure, in Markdown.

A room is a folder of a package's first level, and each module beside them. Its floor is one above
all that it imports. A circle is a set of rooms, or of modules, that import each other. An arrow up
is an import within a circle of rooms against the order that has the fewest of them.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import permutations
from pathlib import Path

PACKAGES = ("rope", "model_runtime", "server", "studies", "ropewalk")
KINDS = ("code", "docstrings and comments", "blank")

Graph = Mapping[str, set[str]]


@cache
def modules(path: Path) -> frozenset[str]:
    """Full names of what a file imports when it runs; ours by their folders."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(name.removeprefix("ropewalk.") for name in names)


def folder_of(root: Path, package: str) -> Path:
    """The folder of a package, which is not a link."""
    for folder in (root / "ropewalk" / package, root / package):
        if folder.is_dir():
            return folder.resolve()
    return root / package


def named(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """The files of these packages by the names of their modules, without `ropewalk`."""
    found = {}
    for package in packages:
        folder = folder_of(root, package)
        # Those of `ropewalk` beside the packages in it.
        paths = folder.glob("*.py") if package == "ropewalk" else folder.rglob("*.py")
        for path in sorted(paths):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts)] = path
    return found


def imports(names: Mapping[str, Path]) -> Graph:
    """The modules among these that each one imports when it runs."""
    return {
        name: {each for found in modules(path) for each in (found, found.rpartition(".")[0])}
        & {*names} - {name}
        for name, path in names.items()
    }


def circles(graph: Graph) -> list[set[str]]:
    """The largest sets of names that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, waiting = set[str](), [start]
        while waiting:
            further = graph[waiting.pop()] - found
            found |= further
            waiting += further
        reached[start] = found
    together = {
        frozenset(each for each in reached[name] if name in reached[each])
        for name in graph
        if name in reached[name]
    }
    return [set(each) for each in together if len(each) > 1]


def arrows_up(circle: set[str], arrows: Counter[tuple[str, str]]) -> int:
    """The fewest imports against an order of the rooms; of large circles the larger side's."""
    if len(circle) > 8:
        order = sorted(circle, key=lambda name: sum(arrows[name, each] for each in circle))
        return _against(order, arrows)
    return min(_against(order, arrows) for order in permutations(sorted(circle)))


def _against(order: Iterable[str], arrows: Counter[tuple[str, str]]) -> int:
    above = list(order)
    return sum(arrows[low, high] for at, high in enumerate(above) for low in above[:at])


def lines_of(paths: Iterable[Path]) -> Counter[str]:
    """The number of lines of each kind."""
    counts: Counter[str] = Counter()
    for path in paths:
        text = path.read_text()
        told = {node.start[0] for node in _comments(text)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if ast.get_docstring(node, clean=False) is not None and first is not None:
                    told |= set(range(first.lineno, (first.end_lineno or 0) + 1))
        for number, line in enumerate(text.splitlines(), 1):
            told_or_code = KINDS[1] if number in told else KINDS[0]
            counts[told_or_code if line.strip() else KINDS[2]] += 1
    return counts


def _comments(text: str) -> list[tokenize.TokenInfo]:
    """The comments that have a line of their own."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [each for each in tokens if each.type == tokenize.COMMENT and _is_alone(each)]


def _is_alone(token: tokenize.TokenInfo) -> bool:
    return not token.line[: token.start[1]].strip()


def rooms_of(root: Path, package: str) -> tuple[int, int, int, int]:
    """The rooms of a package, their floors, circles and arrows up."""
    names = named(root, [package])
    room_of = {name: name.split(".")[1] for name in names if name.split(".")[1] != "__init__"}
    graph: dict[str, set[str]] = {room: set() for room in room_of.values()}
    arrows: Counter[tuple[str, str]] = Counter()
    for name, found in imports(names).items():
        for each in found & {*room_of}:
            if name in room_of and room_of[name] != room_of[each]:
                arrows[room_of[name], room_of[each]] += 1
                graph[room_of[name]].add(room_of[each])
    folder = folder_of(root, package)
    folders = {path.parent for path in names.values() if path.parent.parent == folder}
    round_ = circles(graph)
    floors: dict[str, int] = defaultdict(lambda: 1)
    for _ in graph:  # a floor rises by one each time, and circles end with the number of rooms
        for room, below in graph.items():
            floors[room] = max((floors[each] + 1 for each in below), default=1)
    num_floors = 0 if round_ else max(floors.values(), default=1)
    return len(folders), num_floors, len(round_), sum(arrows_up(each, arrows) for each in round_)


def table(root: Path) -> list[str]:
    """The lines of the table."""
    names = named(root, PACKAGES) | {path.stem: path for path in root.glob("ropewalk.py")}
    plain = {name: path for name, path in names.items() if path.name != "__init__.py"}
    rows: list[tuple[str, object]] = [
        ("modules", len(plain)),
        ("packages", len(names) - len(plain)),
        ("circles of modules", len(circles(imports(plain)))),
    ]
    for package in PACKAGES[1:4]:
        if folder_of(root, package).is_dir():
            folders, floors, num_circles, up = rooms_of(root, package)
            rows += [
                (f"{package}: rooms of the first level", folders),
                (f"{package}: floors", floors or "none, for its circles"),
                (f"{package}: circles, and arrows up", f"{num_circles}, {up}"),
            ]
    folders_of = Counter(path.parent for path in plain.values())
    rows.append(("files of the fullest folder", max(folders_of.values())))
    rows.append(("folders of more than 12 files", sum(num > 12 for num in folders_of.values())))
    served = {path for name, path in names.items() if not name.startswith("studies.")}
    parts = {
        "the product": names.values(),
        "the product without studies": served,
        "tests": named(root, ["tests"]).values(),
    }
    for part, paths in parts.items():
        counts = lines_of(paths)
        kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS)
        rows.append((f"lines of {part}", f"{counts.total():,}: {kinds}"))
    return ["| count | |", "|---|--:|", *(f"| {what} | {found} |" for what, found in rows)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1])
    sys.stdout.write("\n".join(table(parser.parse_args().folder.resolve())) + "\n")


if __name__ == "__main__":
    main()
