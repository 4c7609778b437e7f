"""Small facts in a JSON file that later starts read, by a key that says what they are about.

The file is an optimisation: without it, or with a damaged one, a start finds the facts again.
"""

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.json_files import read_object

_MOST_KEPT = 256  # the newest


def read_kept(path: Path) -> dict[str, Any]:
    """Return the facts of a file, oldest first; none if it cannot be read."""
    try:
        return dict(read_object(path) or {})
    except ModelError:  # it was damaged
        return {}


def write_kept(path: Path, facts: Mapping[str, Any]) -> None:
    """Replace a file by the newest of `facts`, if its folder takes it."""
    # Not by the number of the process, because containers share those.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        newest = dict(list(facts.items())[-_MOST_KEPT:])
        part.write_text(json.dumps(newest), encoding="ascii")
        part.replace(path)
