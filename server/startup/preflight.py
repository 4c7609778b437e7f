"""A guard for generic package names: `rope` and `model_runtime` must be the ones beside us.

PyPI has another package called `rope` (a refactoring library that language servers pull in). In an
environment that has both, Python may import the other one. This module imports neither.
"""

import importlib.util
from pathlib import Path


def foreign_package() -> str | None:
    """A sentence that says what to do, if Python would import somebody else's package."""
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
