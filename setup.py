"""Keep the commit in a wheel and in an archive of the sources.

Everything else about the package is in pyproject.toml.
"""

import os
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_ROOT = Path(__file__).resolve().parent
_VERSION = runpy.run_path(str(_ROOT / "ropewalk" / "server" / "version.py"))
# For builds without a clone, such as the image's.
_VARIABLE = "SOURCE_COMMIT"


def _keep_commit(folder: Path) -> None:
    """Write the commit into a copy of the sources, or what an archive of them has kept."""
    name = _VERSION["COMMIT_FILE"]
    kept, copied = (each / "ropewalk" / "server" / name for each in (_ROOT, folder))
    commit = _VERSION["commit_of_clone"](_ROOT) or os.environ.get(_VARIABLE)
    if commit:
        copied.write_text(f"{commit}\n", encoding="utf-8")
    elif not kept.is_file():
        copied.unlink(missing_ok=True)  # of an earlier build in the same folder


class BuildWithCommit(build_py):
    """Build a wheel that knows its commit; an editable installation asks its clone instead."""

    def run(self) -> None:
        """Copy the sources, then write the commit beside them."""
        super().run()
        if not self.editable_mode:
            _keep_commit(Path(self.build_lib))


class SourcesWithCommit(sdist):
    """Pack an archive that knows its commit, because it holds no clone."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the sources, then write the commit beside them."""
        super().make_release_tree(base_dir, files)
        _keep_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SourcesWithCommit})
