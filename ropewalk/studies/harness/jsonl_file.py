"""An append-only file of JSON lines with the finished parts of a run that can be resumed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LineFile:
    """A file with one JSON value per line, each on disk as soon as it is added."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, value: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (number from 1, text) of every whole line.

        After the last one, an incomplete line at the end of the file is cut off.
        """
        whole, _, cut = self._path.read_text(encoding="utf-8").rpartition("\n")
        yield from enumerate(whole.splitlines(), start=1)
        if cut:
            self._path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
