"""The `ropewalk` command: find our own packages first, then run the command line.

The names `server`, `rope` and `model_runtime` are common, and PYTHONPATH or the current directory
may hold other packages of these names. The command begins here, because nothing else is called
`ropewalk`. This module imports nothing that is not Python's own.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parent
_PACKAGES = ("server", "rope", "model_runtime")
_USAGE_ERROR = 2


class OwnPackages(MetaPathFinder):
    """A finder that looks for our packages beside this file only, before every other finder."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # the same for a top-level package
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of one of our top-level packages, and None for any other module."""
        if fullname not in _PACKAGES:
            return None
        return PathFinder.find_spec(fullname, [str(_ROOT)], target)


def problem() -> str | None:
    """Return an instruction for the user if our packages are missing, or others took their names.

    Return None if the right packages will be imported.
    """
    for name in _PACKAGES:
        if not (_ROOT / name / "__init__.py").is_file():
            return f"there is no package '{name}' in {_ROOT}: install ropewalk again."
        taken = sys.modules.get(name)
        if taken is None:
            continue
        found = getattr(taken, "__file__", None)
        folder = Path(found).resolve().parent if found else None
        if folder != _ROOT / name:
            return (
                f"Python has imported the package '{name}' from {folder or 'elsewhere'}, not from "
                f"{_ROOT / name}. Another project has the same name: install ropewalk into a "
                "virtual environment of its own."
            )
    return None


def main() -> None:
    """Make sure that Python imports our own packages, then run the command line."""
    found = problem()
    if found is not None:
        sys.stderr.write(f"ropewalk: {found}\n")
        sys.exit(_USAGE_ERROR)
    sys.meta_path.insert(0, OwnPackages())
    from server.__main__ import main as run  # noqa: PLC0415  # not before the finder

    run()


if __name__ == "__main__":
    main()
