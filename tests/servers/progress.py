"""Lines about a long test's progress: seen with `pytest -s`, and after a failure."""

import sys


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
