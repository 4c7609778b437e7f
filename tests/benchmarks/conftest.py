"""Scripts that measure are not installed, so their tests run with `make test-full`."""

from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark the tests of this folder as `long`, but for a file that takes no time."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem != "test_ratios":
            item.add_marker(pytest.mark.long)
