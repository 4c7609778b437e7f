"""`make test-full` leaves no test out, and CONTRIBUTING names its parts."""

from pathlib import Path

import pytest

from tests import full
from tests.full import PATHS, ROOT, commands, files_of, part_of


def test_every_file_is_in_one_part() -> None:
    """The most special path decides."""
    files = sorted(str(each.relative_to(ROOT)) for each in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(file for part in PATHS for file in files_of(part)) == files
    assert part_of(Path("model_runtime/parallel/test_plan.py")) == "parallel"
    assert part_of(Path("model_runtime/text/test_grammar.py")) == "runtime"
    assert part_of(Path("test_docs.py")) == "rules"
    assert all(map(files_of, PATHS))


def test_the_parts_are_those_of_contributing() -> None:
    """A part without a change that owes it would never run."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    assert rows == list(commands())


@pytest.mark.parametrize(
    ("codes", "is_failure"), [((0, 0), False), ((0, 1), True), ((5, 0), False)]
)
def test_a_failed_part_fails_the_run_after_the_others(
    codes: tuple[int, int],
    is_failure: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each part says its time; one without tests of its marks has passed."""
    parts = {
        f"part{at}": (
            full.sys.executable,
            "-c",
            f"import os; assert os.environ['SAMPLE'] == 'all'; raise SystemExit({code})",
        )
        for at, code in enumerate(codes)
    }
    monkeypatch.setattr(full, "commands", lambda: parts)
    monkeypatch.setattr(full.sys, "argv", ["full"])
    with pytest.raises(SystemExit) as ended:
        full.main()
    assert bool(ended.value.code) is is_failure
    told = capsys.readouterr().out
    assert told.count("FAILED") == 2 * sum(code == 1 for code in codes)
    assert all(f"part {part} " in told for part in parts)


@pytest.mark.costly
def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names those that there are."""
    monkeypatch.setattr(full.sys, "argv", ["full", "paralel"])
    with pytest.raises(SystemExit, match="no such part: paralel; there are parallel, attention"):
        full.main()
