"""Sampled matrices have their fixed members always, and all others within ten seeds of CI."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sampling
from tests.sampling import (
    IS_WHOLE,
    asks_for_costly,
    drawn_by,
    header,
    not_drawn,
    not_drawn_costly,
    sampled,
    seed_of_commit,
)


@pytest.fixture(autouse=True)
def _as_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_ROUND", 10)


CASES = [(name, size) for name in ("llama", "gemma", "phi") for size in range(17)]


@pytest.mark.parametrize("first_seed", [0, 7, 1234])
@pytest.mark.parametrize("drawn", [0, 9, 100])
def test_ten_seeds_in_a_row_draw_every_case(first_seed: int, drawn: int) -> None:
    """About as often each, and the fixed ones each time."""
    seen = Counter(
        case
        for seed in range(first_seed, first_seed + 10)
        for case in drawn_by(seed, CASES, fixed=1, drawn=drawn, kind=lambda case: case[0])
    )
    assert set(seen) == set(CASES)
    assert all(seen[name, 0] == 10 for name in ("llama", "gemma", "phi"))


def test_a_draw_is_small_in_order_and_repeats() -> None:
    """A tenth of the others, or as many as a test asks for."""
    found = drawn_by(5, CASES, fixed=[("phi", 3)])
    assert found == drawn_by(5, CASES, fixed=[("phi", 3)])
    assert found != drawn_by(6, CASES, fixed=[("phi", 3)])
    assert ("phi", 3) in found
    assert found == sorted(found, key=CASES.index)
    assert len(found) == 1 + 5
    assert len(drawn_by(5, CASES, fixed=2, drawn=8)) == 10
    assert drawn_by(5, CASES[:1]) == CASES[:1]
    assert drawn_by(5, CASES[:0]) == []


def test_cases_that_look_alike_to_python_are_kept_apart() -> None:
    """Cases may be unhashable, and equal."""
    assert drawn_by(3, [{}, {}, {}], fixed=3) == [{}, {}, {}]


@pytest.mark.parametrize(
    ("variables", "said", "num"),
    [
        ({"SAMPLE_SEED": "41"}, "SAMPLE_SEED=41 repeats", 4),
        ({"SAMPLE_SEED": "41", "CI": "true"}, "SAMPLE_SEED=41 repeats", 6),
        ({"SAMPLE": "all"}, "SAMPLE=all", 51),
    ],
)
def test_variables_choose_the_draw(variables: dict[str, str], said: str, num: int) -> None:
    """The head of a run says how to repeat it; a process that it starts has the same seed."""
    code = (
        "import os; from tests.sampling import *; print(header());"
        "print(len(sampled(range(51)))); print(os.environ['SAMPLE_SEED'])"
    )
    clean = {key: each for key, each in os.environ.items() if not key.startswith(("SAMPLE", "CI"))}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **variables},
    )
    head, size, seed = ended.stdout.splitlines()
    assert head.startswith(said)
    assert int(size) == num
    assert int(seed) == int(variables.get("SAMPLE_SEED", seed_of_commit()))


@dataclass(frozen=True)
class Item:
    """A test as pytest collects it."""

    case: tuple[tuple[str, Any], ...]
    path: Path = Path("test_it.py")
    originalname: str = "test"
    marker: str | None = "sampled"
    by: str | None = "name"

    @property
    def callspec(self) -> Any:
        """Its parameters, with the id that pytest makes of them."""
        return SimpleNamespace(id="-".join(str(each) for _, each in self.case), params=self.params)

    @property
    def nodeid(self) -> str:
        """Its name in a run."""
        return f"{self.path}::{self.originalname}[{self.callspec.id}]"

    @property
    def params(self) -> dict[str, Any]:
        """The parameters by name."""
        return dict(self.case)

    def get_closest_marker(self, name: str) -> Any:
        """Return its marker."""
        return SimpleNamespace(kwargs={"by": self.by}) if name == self.marker else None


@pytest.mark.skipif(IS_WHOLE, reason="nothing is left out of the whole matrix")
def test_a_marked_matrix_runs_a_part() -> None:
    """The first case of each kind is there, and a tenth of the rest; a case alone always is."""
    cases = [(("name", name), ("size", size)) for name in ("llama", "phi") for size in range(51)]
    marked = [Item(case) for case in cases]
    other = [Item(case, marker=None) for case in cases]
    left_out = not_drawn([*marked, *other])
    kept = [each for each in marked if each not in left_out]
    assert len(kept) == 2 + 10
    assert {each.params["name"] for each in kept if each.params["size"] == 0} == {"llama", "phi"}
    assert not set(left_out) & set(other)
    assert not any(not_drawn([each]) for each in left_out)


def costly_items() -> tuple[list[Item], list[Item]]:
    """Fifteen tests of two cases, and a file of twelve tests."""
    tests = [
        Item((("size", size),), originalname=f"test_{number}", marker="costly", by=None)
        for number in range(15)
        for size in range(2)
    ]
    file = [
        Item((), Path("test_file.py"), f"test_{number}", marker="costly", by="file")
        for number in range(12)
    ]
    return tests, file


@pytest.mark.skipif(IS_WHOLE, reason="nothing is left out of the whole")
@pytest.mark.parametrize("num_seeds", [10, 20])
def test_seeds_in_a_row_draw_each_costly_case_once(
    monkeypatch: pytest.MonkeyPatch, num_seeds: int
) -> None:
    """A file may be one of them, and other tests stay. A test that comes moves no other one."""
    monkeypatch.setattr(sampling, "_COSTLY_ROUND", num_seeds)
    tests, file = costly_items()
    others = [replace(each, marker=None) for each in tests]
    seen = Counter[Item]()
    for seed in range(7, 7 + num_seeds):
        monkeypatch.setattr(sampling, "SEED", seed)
        left_out = not_drawn_costly([*tests, *file, *others])
        kept_of_file = [each for each in file if each not in left_out]
        assert kept_of_file in ([], file)
        assert not set(left_out) & set(others)
        assert {*not_drawn_costly(tests[3:])} == set(left_out) & {*tests[3:]}
        seen.update(each for each in [*tests, *file] if each not in left_out)
    assert seen == Counter([*tests, *file])


@pytest.mark.parametrize(
    ("arguments", "keyword", "asks"),
    [
        (["tests/test_sampling.py"], "", True),
        (["tests/test_sampling.py::test_it[case]", "tests/test_docs.py"], "", True),
        (["tests/server"], "", False),
        (["tests/test_docs.py", "tests/server"], "", False),
        ([], "", False),
        (["tests"], "kernels", True),
    ],
)
@pytest.mark.parametrize("draws_always", [False, True])
def test_named_files_and_keywords_ask_for_costly_tests(
    arguments: list[str],
    keyword: str,
    asks: bool,  # noqa: FBT001
    draws_always: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folders do not, and nothing does with SAMPLE=drawn, which `make test` sets."""
    monkeypatch.setattr(sampling, "_DRAWS_ALWAYS", draws_always)
    root = Path(__file__).resolve().parent.parent
    assert asks_for_costly(arguments, keyword, root) == (asks and not draws_always)


def test_this_run_says_how_it_is_repeated() -> None:
    """All workers of a run have the seed of the process that started them."""
    assert os.environ["SAMPLE_SEED"] in header() or os.environ["SAMPLE"] == "all"
    assert sampled(CASES) == sampled(CASES)
