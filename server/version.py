"""The release of this package, also if it runs from source without being installed."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def own_version() -> str:
    """Return the version of the installed package, or of the pyproject.toml beside it."""
    try:
        return version("ropewalk")
    except PackageNotFoundError:
        pyproject = Path(__file__).parents[1] / "pyproject.toml"
        stated: str = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"]
        return stated
