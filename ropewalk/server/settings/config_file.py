"""The YAML file of settings: `--config FILE`."""

import re
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
    if not isinstance(found, dict):
        raise ConfigFileError(f"config: {path} must hold settings as `name: value`")
    return found


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a text file could not be read, as a part of a sentence."""
    return str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8"


_MERGE = "tag:yaml.org,2002:merge"
# YAML 1.1 reads 010 as 8 and 12:30 as 750.
_OLD_NUMBER = re.compile("[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+([.][0-9_]*)?)")
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses equal keys, keys that are no text, and numbers with two readings.

    PyYAML silently keeps the last of equal keys. Dates stay text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # PyYAML's signature
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                raise _refused(
                    "merge keys (<<) are not supported, write the settings out", key_node
                )
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                told = (
                    key_node.value
                    if isinstance(key_node, yaml.ScalarNode)
                    else "a list or an object"
                )
                raise _refused(f"a name must be text, got {told}", key_node)
            if key in seen:
                raise _refused(f"{key!r} is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Construct a number that every version of YAML reads alike."""
        if _OLD_NUMBER.fullmatch(node.value):
            raise _refused(
                f"{node.value} is another number in YAML 1.1 than it seems: write it in decimal "
                "digits, or in quotes if it is text",
                node,
            )
        is_integer = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)


for _tag in _NUMBERS:
    _StrictLoader.add_constructor(_tag, _StrictLoader.construct_number)
_StrictLoader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _refused(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _one_line(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
