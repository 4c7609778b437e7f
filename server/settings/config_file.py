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
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigFileError(f"config: cannot read {path}: {reason}") from error
    try:
        found = yaml.load(text, _StrictLoader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigFileError(f"config: {path} is not YAML: {_one_line(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigFileError(f"config: {path} must hold settings as `name: value`")
    return found


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses equal keys (PyYAML silently keeps the last) and keeps dates as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # PyYAML's signature
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # PyYAML's own error follows
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _one_line(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
