"""The package's own statements about itself: its extras, its release, and commands that name it."""

import re
import tomllib
from pathlib import Path

from ropewalk.model_runtime.engine.kv_disk.stores.store_url import NEEDS_CLIENT
from ropewalk.studies.harness.plotting import INSTALL_MATPLOTLIB

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_text_installs_a_package_that_is_on_no_index() -> None:
    """`pip install ropewalk` finds nothing, or what a stranger puts there."""
    texts = [ROOT / "README.md"]
    texts += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    texts += [each for each in (ROOT / "docker").rglob("*") if each.is_file()]
    texts += (ROOT / "ropewalk").rglob("*.py")
    named = re.compile(r"ropewalk\[|install (?:-\S+ )*['\"]?ropewalk\b(?! (?:again|into))")
    found = {
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path in texts
        for hit in named.finditer(path.read_text())
    }
    assert found == {"docs/guide/install.md: install ropewalk"}  # the sentence that says so


def test_the_named_requirements_are_those_of_the_extras() -> None:
    """A text that names another version would install one that was not tried."""
    extras = PROJECT["optional-dependencies"]
    assert f"pip install '{extras['plot'][0]}'" == INSTALL_MATPLOTLIB
    places = (ROOT / "ropewalk/server/startup/named_places.py").read_text()
    assert f"pip install '{extras['ray'][0]}'" in places
    assert f"pip install '{extras['valkey'][0]}'" in NEEDS_CLIENT
    exporter, sdk = extras["otel"]
    assert f"'{exporter}' '{sdk}'" in places


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    """A section above it is of a release that is in the making."""
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = [each for each in headings if not each.endswith(" - unreleased")]
    assert headings[-len(dated) :] == dated
    newest, _, date = dated[0].partition(" - ")
    assert newest == PROJECT["version"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
