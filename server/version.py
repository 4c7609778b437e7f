"""Which release this is, also where it runs from its sources and was never installed."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def own_version() -> str:
    """Of the installed package; else of the pyproject.toml beside the packages."""
    try:
        return version("ropewalk")
    except PackageNotFoundError:
        pyproject = Path(__file__).parents[1] / "pyproject.toml"
        stated: str = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"]
        return stated
