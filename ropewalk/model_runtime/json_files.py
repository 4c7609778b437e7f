"""JSON files of a checkpoint, with a limit of their depth.

Python's and transformers' functions descend by a call for each level, and end the process' command
with a RecursionError where a file has thousands of them.
"""

import json
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.errors import ModelError

_MOST_LEVELS = 64  # those of published checkpoints have up to ten


def read_json(path: Path) -> Any:
    """Return a file's value; None if the file is absent or no JSON.

    Raises ModelError if its lists and objects are nested too deeply.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    except RecursionError as error:
        raise _too_deep(path) from error
    level = [found]
    for _ in range(_MOST_LEVELS):
        level = [item for each in level for item in _items(each)]
        if not level:
            return found
    raise _too_deep(path)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return a file's object; None if the file is absent or holds something else.

    Raises ModelError if it is nested too deeply.
    """
    found = read_json(path)
    return found if isinstance(found, dict) else None


def _items(value: Any) -> list[Any]:
    """Return the lists and objects in a list or an object."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return []
    return [each for each in value if isinstance(each, dict | list)]


def _too_deep(path: Path) -> ModelError:
    return ModelError(f"{path} must have at most {_MOST_LEVELS} levels of lists and objects")
