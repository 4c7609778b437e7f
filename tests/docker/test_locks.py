"""The image's locks: with hashes, of the tested versions, without developers' tools."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.dockerfile import instructions
from tests.locks import EXTRAS, FOLDER, PROJECT, entries

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {path.stem: entries(path.read_text()) for path in sorted(FOLDER.iterdir())}
_TESTED = {
    str(canonicalize_name(name)): version
    for name, _, version in (
        line.partition("==") for line in (ROOT / "requirements.lock").read_text().splitlines()
    )
    if version
}


def test_there_is_a_lock_for_each_part_and_each_extra() -> None:
    """The developers' tools are in none."""
    assert set(LOCKS) == {"build", "runtime", "torch", *EXTRAS}
    tools = {canonicalize_name(Requirement(each).name) for each in _extra("dev")}
    own = {canonicalize_name(Requirement(each).name) for name in EXTRAS for each in _extra(name)}
    for name in ("runtime", "torch", "ray", "otel"):
        assert not set(LOCKS[name]) & (tools - own - {"triton"}), name
    assert {"pytest", "mypy", "openai"} <= tools - own


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_hashes_and_the_tested_version(name: str) -> None:
    """A package that the tested set lacks is of another platform, or of CUDA."""
    text = (FOLDER / f"{name}.lock").read_text()
    assert len(LOCKS[name]) == len(re.findall(r"^[a-z]", text, re.MULTILINE)) > 0
    for package, entry in LOCKS[name].items():
        version = re.match(r"\S+==([^\s;]+)", entry)
        assert version is not None
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), package
        assert _TESTED.get(canonicalize_name(package), version[1]) == version[1], package


def test_the_image_installs_nothing_from_an_index_without_hashes() -> None:
    """Only torch may come from an index that the lock does not know, and then alone."""
    steps = instructions("RUN")
    commands = [each for step in steps for each in re.findall(r"pip (?:install|wheel) [^&]*", step)]
    assert len(commands) == 5
    for command in commands:
        is_local = "--no-index" in command or "pip wheel" in command
        is_torch = "--no-deps --index-url" in command and "torch.txt" in command
        assert "--require-hashes" in command or is_local or is_torch, command
    (wheel,) = (each for each in commands if each.startswith("pip wheel"))
    assert "--no-build-isolation --" in wheel
    assert "--no-deps" in wheel


def _extra(name: str) -> list[str]:
    found: list[str] = PROJECT["project"]["optional-dependencies"][name]
    return found
