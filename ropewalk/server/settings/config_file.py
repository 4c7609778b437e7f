"""The YAML file of settings: `--config FILE`."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


class ConfigFileError(ValueError):
    """A file that cannot be read; the message names it."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the settings by name, not checked yet. Raises ConfigFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"config: cannot read {path}: {why_unreadable(error)}") from error
    try:
        found = yaml.load(text, _StrictLoader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        told = (
            "cannot be used"
            if isinstance(error, yaml.constructor.ConstructorError)
            else "is not YAML"
        )
        raise ConfigFileError(f"config: {path} {told}: {_one_line(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigFileError(f"config: {path} must contain settings as `name: value`")
    return found


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a text file could not be read, as a part of a sentence."""
    return str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8"


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses equal keys, of which PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # PyYAML's signature
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def _one_line(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
