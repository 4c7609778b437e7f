"""A part of a matrix of cases: fixed members, and others that change from commit to commit.

Where CI is set, a tenth of the other cases, or more, is drawn, and elsewhere a twentieth. The draw
follows SAMPLE_SEED, which is the number of commits unless it is given. So ten commits in a row that
CI sees have every case. SAMPLE=all gives the whole of each (`make test-full`).

Tests marked `costly` are drawn, too: a tenth of them where CI is set, else about a fortieth.

A run of named files, or with -k, asks for its costly tests, so all of them run. SAMPLE=drawn draws
them all the same.
"""

import hashlib
import os
import random
import subprocess
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_Case = TypeVar("_Case")
# Seeds in a row that draw every case, and every costly test.
_ROUND, _COSTLY_ROUND = (10, 10) if os.environ.get("CI") else (20, 40)
_ROOT = Path(__file__).resolve().parent.parent


def _git(*arguments: str) -> str:
    try:
        ended = subprocess.run(
            ["git", *arguments],  # noqa: S607  # whichever one the developer uses
            cwd=_ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ended.stdout.strip()


def seed_of_commit() -> int:
    """Return the number of commits; of a shallow clone, a number from the hash; else 0."""
    if _git("rev-parse", "--is-shallow-repository") == "true":
        return int(_git("rev-parse", "HEAD")[:6], 16)
    return int(_git("rev-list", "--count", "HEAD") or 0)


# Every worker of pytest-xdist inherits it, so all of them collect the same tests.
SEED = int(os.environ.setdefault("SAMPLE_SEED", str(seed_of_commit())))
IS_WHOLE = os.environ.get("SAMPLE") == "all"
_DRAWS_ALWAYS = os.environ.get("SAMPLE") == "drawn"


def header() -> str:
    """Return how to repeat the draw, for the head of a run."""
    return "SAMPLE=all" if IS_WHOLE else f"SAMPLE_SEED={SEED} repeats this run's draw of cases"


def sampled(
    cases: Sequence[_Case],
    *,
    fixed: int | Collection[_Case] = 1,
    drawn: int = 0,
    kind: Callable[[_Case], Hashable] = lambda _: None,
) -> list[_Case]:
    """Return the fixed cases and some of the others, in order.

    `fixed`: the first so many of each kind, or these members. `drawn`: at least so many others; a
    part of them is drawn anyway.
    """
    return list(cases) if IS_WHOLE else drawn_by(SEED, cases, fixed=fixed, drawn=drawn, kind=kind)


def drawn_by(
    seed: int,
    cases: Sequence[_Case],
    *,
    fixed: int | Collection[_Case] = 1,
    drawn: int = 0,
    kind: Callable[[_Case], Hashable] = lambda _: None,
) -> list[_Case]:
    """Return what `sampled` gives for a seed."""
    kept, others = set[int](), list[int]()
    num_kept: dict[Hashable, int] = {}
    for at, case in enumerate(cases):
        if isinstance(fixed, int):
            num_kept[kind(case)] = num_kept.get(kind(case), 0) + 1
            is_fixed = num_kept[kind(case)] <= fixed
        else:
            is_fixed = case in fixed
        if is_fixed:
            kept.add(at)
        else:
            others.append(at)
    drawn = min(len(others), max(drawn, -(-len(others) // _ROUND)))
    # One order for all seeds, so that the draws of seeds in a row follow each other. It differs
    # between matrices, so that these do not march in step.
    names = hashlib.sha256(repr([str(each) for each in cases]).encode()).hexdigest()
    random.Random(names).shuffle(others)
    kept.update(others[(seed * drawn + at) % len(others)] for at in range(drawn))
    return [cases[at] for at in sorted(kept)]


def few(whole: int, some: int) -> int:
    """Return a number of random examples: all of them in the whole suite, else some."""
    return whole if IS_WHOLE else some


def not_drawn(items: Sequence[Any]) -> dict[Any, None]:
    """Return the cases of tests marked `sampled` that this run leaves out.

    `@pytest.mark.sampled(fixed=1, drawn=2, by="name")`: `by` has the parameters, separated by
    commas, whose values make a kind. A case that is asked for alone is fixed, so it runs.
    """
    matrices: dict[tuple[Path, str], list[Any]] = {}
    for item in items:
        is_costly = item.get_closest_marker("costly") is not None  # a member of that matrix
        is_case = hasattr(item, "callspec") and not is_costly
        if is_case and item.get_closest_marker("sampled") is not None:
            matrices.setdefault((item.path, item.originalname), []).append(item)
    left_out: dict[Any, None] = {}
    for matrix in matrices.values():
        options = matrix[0].get_closest_marker("sampled").kwargs
        left_out |= dict.fromkeys(set(matrix) - set(_sampled_items(matrix, **options)))
    return left_out


def asks_for_costly(arguments: Sequence[str], keyword: str, folder: Path) -> bool:
    """Return whether a run asks for its costly tests: it names files only, or has a keyword.

    `folder` is the one that arguments are relative to.
    """
    if _DRAWS_ALWAYS:
        return False
    paths = [folder / each.partition("::")[0] for each in arguments]
    return bool(keyword) or (bool(paths) and not any(each.is_dir() for each in paths))


def not_drawn_costly(items: Sequence[Any]) -> dict[Any, None]:
    """Return the cases of tests marked `costly` that a run leaves out if it does not ask for them.

    `@pytest.mark.costly` is for a test whose cases take many seconds each. If cases of a file share
    what takes them, such as a compilation, `costly(by="bfloat16")` draws those with the same `by`
    together; `by="file"` is for whole files. Each is drawn by its own name, so a new test changes
    the draw of no other one.
    """
    left_out: dict[Any, None] = {}
    for item in items:
        marker = item.get_closest_marker("costly")
        # Those marked `long` are not drawn, because their marker alone decides.
        if IS_WHOLE or marker is None or item.get_closest_marker("long") is not None:
            continue
        by = marker.kwargs.get("by")
        name = item.nodeid if by is None else f"{item.nodeid.partition('::')[0]} {by}"
        if (
            int(hashlib.sha256(name.encode()).hexdigest(), 16) % _COSTLY_ROUND
            != SEED % _COSTLY_ROUND
        ):
            left_out[item] = None
    return left_out


def _sampled_items(
    matrix: Sequence[Any], *, fixed: int = 1, drawn: int = 0, by: str = ""
) -> list[Any]:
    names = [each for each in by.split(",") if each]
    cases = {item.callspec.id: item for item in matrix}

    def kind(case: str) -> Hashable:
        return tuple(str(cases[case].callspec.params[name]) for name in names)

    return [cases[each] for each in sampled(list(cases), fixed=fixed, drawn=drawn, kind=kind)]
