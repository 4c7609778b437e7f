"""A wait for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], what: str = "", limit_s: float = 60) -> None:
    """Return once a condition holds. Raises AssertionError with `what` after the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"after {limit_s} s still not so: {what}"
        time.sleep(0.02)
