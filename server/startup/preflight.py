"""A check that `rope` and `model_runtime` are the packages beside this one.

PyPI has another package called `rope` (a refactoring library that language servers pull in). If an
environment has both, Python may import the other one. The installed command is safe from that
(ropewalk.py); this check is for `python -m server`. This module imports neither.
"""

import importlib.util
from pathlib import Path


def foreign_package() -> str | None:
    """Return an instruction for the user if Python would import another project's package.

    Return None if the packages are the right ones.
    """
    root = Path(__file__).resolve().parents[2]
    for name in ("rope", "model_runtime"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if found is None:
            return f"Python finds no package '{name}': install ropewalk again."
        if found != root / name:
            return (
                f"Python finds the package '{name}' at {found}, not at {root / name}. Another "
                "project has the same name: install ropewalk into a virtual environment of its own."
            )
    return None
