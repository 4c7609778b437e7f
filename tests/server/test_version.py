"""A clone, a wheel and an archive state a release and its commit, or that the commit is unknown."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ropewalk.server import version as version_module

ROOT = Path(__file__).parents[2]
LINKS = ("rope", "model_runtime", "server")
_PACKED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ropewalk", *LINKS)
_WHAT = ("NAME", "EMAIL")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The standard output of a command that succeeds."""
    author = {f"GIT_{role}_{what}": "t" for role in ("AUTHOR", "COMMITTER") for what in _WHAT}
    environment = {**os.environ, **author, **variables}
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout.strip()


def told(folder: Path) -> str:
    """The first line of `--version` of the packages in a folder."""
    return run(sys.executable, "-m", "ropewalk", "--version", cwd=folder)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is packed, with one commit."""
    folder = tmp_path_factory.mktemp("clone")
    for name in _PACKED:
        source = ROOT / name
        if source.is_symlink():
            (folder / name).symlink_to(source.readlink())
        elif source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    (folder / ".gitignore").write_text("__pycache__/\n/build/\n/dist/\n*.egg-info/\n")
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    run("git", "commit", "--quiet", "--message", "x", cwd=folder)
    run("git", "tag", "v9", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def head(clone: Path) -> str:
    """The first twelve digits of its commit."""
    return run("git", "rev-parse", "HEAD", cwd=clone)[:12]


@pytest.fixture(scope="module")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel of the clone is unpacked to."""
    to = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", to, clone, cwd=to)
    (wheel,) = to.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to / "site")  # noqa: S202  # our own wheel
    return to / "site"


def test_a_clone_knows_its_commit_and_whether_files_differ(clone: Path, head: str) -> None:
    """The command asks git, so a later commit is known without another installation."""
    assert told(clone).endswith(f" (commit {head})")
    readme = clone / "README.md"
    before = readme.read_text()
    readme.write_text("changed")
    try:
        assert told(clone).endswith(f" (commit {head}-dirty)")
    finally:
        readme.write_text(before)


def test_a_wheel_keeps_the_commit_that_it_was_made_from(installed: Path, head: str) -> None:
    """The wheel has no clone, and the sources keep no file of the build."""
    assert not (installed / ".git").exists()
    assert told(installed).endswith(f" (commit {head})")


@pytest.mark.long
def test_an_archive_of_the_sources_keeps_the_commit(clone: Path, head: str, tmp_path: Path) -> None:
    """A wheel is then made from the archive, without git."""
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=clone)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = (each for each in tmp_path.iterdir() if each.is_dir())
    assert told(sources).endswith(f" (commit {head})")
    assert not (sources / "rope").exists()
    built = tmp_path / "built"
    run(sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", built, cwd=sources)
    assert (built / "ropewalk/server" / "commit.txt").read_text() == f"{head}\n"
    named = {"SOURCE_COMMIT": "0123456789ab"}  # as the image's builder is given it
    command = (sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", built)
    run(*command, cwd=sources, **named)
    assert (built / "ropewalk/server" / "commit.txt").read_text() == "0123456789ab\n"


def test_code_without_a_clone_says_that_its_commit_is_unknown(
    installed: Path, clone: Path, tmp_path: Path
) -> None:
    """The clone of another project round it is not asked."""
    for at in (tmp_path / "copy", clone / "build" / "copy"):
        shutil.copytree(installed, at)
        (at / "ropewalk/server/commit.txt").unlink()
        assert told(at).endswith(" (commit unknown)")


def test_a_wheel_has_each_file_once(installed: Path) -> None:
    """No module has a second name at the top, and the licence is there."""
    assert [each.name for each in installed.iterdir() if each.suffix != ".dist-info"] == [
        "ropewalk"
    ]
    assert (installed / "ropewalk/rope/tiers.py").is_file()
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


def test_sources_that_were_never_installed_know_their_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has only a checkout, so the package's metadata is missing."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version_module, "version", missing)
    found = version_module.own_version.__wrapped__()
    assert told(ROOT).startswith(f"ropewalk, version {found} (commit ")


@pytest.mark.parametrize("form", ["without links", "files in their place"])
def test_a_copy_that_lost_its_links_runs(clone: Path, head: str, tmp_path: Path, form: str) -> None:
    """An archive may leave links out, and git on Windows writes files with the link's target."""
    copy = tmp_path / "copy"
    if form == "without links":
        with zipfile.ZipFile(tmp_path / "sources.zip", "w") as archive:
            files = run("git", "ls-files", cwd=clone).splitlines()
            for name in files:
                if name not in LINKS:
                    archive.write(clone / name, name)
        with zipfile.ZipFile(tmp_path / "sources.zip") as archive:
            archive.extractall(copy)  # noqa: S202  # our own archive
        head = "unknown"
    else:
        run("git", "clone", "--quiet", "-c", "core.symlinks=false", clone, copy, cwd=tmp_path)
        assert (copy / "rope").read_text() == "ropewalk/rope"
    assert told(copy).endswith(f" (commit {head})")
