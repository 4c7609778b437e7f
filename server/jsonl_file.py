"""A file of JSON lines that only grows: what is finished of a run that may be taken up again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LineFile:
    """One JSON value a line, each on disk as soon as it is added."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, value: Any) -> None:
        """Write one more line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def lines(self) -> Iterator[tuple[int, str]]:
        """(number from 1, text) of every whole line.

        When all are taken, an end in the middle of writing is cut off.
        """
        whole, _, cut = self._path.read_text(encoding="utf-8").rpartition("\n")
        yield from enumerate(whole.splitlines(), start=1)
        if cut:
            self._path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
