"""Lines for who watches a long test: seen with `pytest -s`, and after a failure."""

import sys


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
