"""Sentences about wrong settings: the setting, what is accepted, the value and its source."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ropewalk.server.settings.fields import Section
from ropewalk.server.settings.request_sections import KeyEntry
from ropewalk.server.settings.sections import DeploymentEntry
from ropewalk.server.wording import accepted, choices, did_you_mean

ENV_PREFIX = "ROPEWALK_"
_MAX_SHOWN = 200  # characters of a value
# settings that are lists of objects with a name -> what one of them is
_LISTS: dict[int | str, tuple[str, type[Section]]] = {
    "deployments": ("a deployment", DeploymentEntry),
    "keys": ("a key", KeyEntry),
}
_SECRETS = {"router_key", "kv_store"}
# Fields of a rope block, as people write them beside it.
_OF_ROPE_SCALING = {"positions", "factor", "rope_type", "original_max_position_embeddings"}
_NO_VALUE_TO_SHOW = {"missing", "extra_forbidden"}  # pydantic's input is then something else


def variable_of(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


@dataclass(frozen=True, slots=True)
class Sources:
    """The values that were given, by source; earlier ones win."""

    flags: Mapping[str, Any]
    in_file: Mapping[str, Any]
    path: object  # of the file, or None

    def value(self, name: str) -> Any:
        if name in self.flags:
            return self.flags[name]
        return os.environ.get(variable_of(name), self.in_file.get(name))

    def origin(self, name: str) -> str:
        if name in self.flags:
            return "the command line"
        return variable_of(name) if variable_of(name) in os.environ else str(self.path)


def unknown_setting(name: str, place: object, known: Collection[str]) -> str:
    hint = _hint(name, known) or " `ropewalk serve --help` lists the settings."
    return f"{name} in {place} is not a setting of ropewalk.{hint}"


def _hint(name: str, known: Collection[str]) -> str:
    """Return a sentence about an unknown setting, with a space before it; empty: there is none."""
    if name in _OF_ROPE_SCALING and "rope_scaling" in known:
        return f" It belongs inside rope_scaling: {{{name}: ...}}."
    return did_you_mean(name, known)


def value_problems(error: ValidationError, sources: Sources) -> list[str]:
    return [_sentence(each, sources) for each in error.errors(include_url=False)]


def _sentence(problem: Mapping[str, Any], sources: Sources) -> str:
    loc = problem["loc"]
    origin = f"(from {sources.origin(str(loc[0]))})"
    if problem["type"] == "extra_forbidden":
        kind, entry = _LISTS[loc[0]]
        known = list(entry.model_fields)
        hint = _hint(str(loc[-1]), known) or f" It has {', '.join(known)}."
        where = "".join(f"{part}: " for part in _place(loc[:-1], sources))
        return f"{where}{loc[-1]} is not a setting of {kind} {origin}.{hint}"
    where = "".join(f"{part}: " for part in _place(loc, sources))
    is_shown = problem["type"] not in _NO_VALUE_TO_SHOW and loc[0] not in _SECRETS
    given = "" if not is_shown else f", got {shown(problem['input'])}"
    hint = did_you_mean(problem["input"], choices(problem))
    return f"{where}{accepted(problem)}{given} {origin}{'.' if hint else ''}{hint}"


def _place(loc: Sequence[int | str], sources: Sources) -> list[str]:
    """Return a location in words, where a deployment or a key has its name."""
    parts = [f"item {part + 1}" if isinstance(part, int) else part for part in loc]
    if loc[0] in _LISTS and len(loc) > 1:
        assert isinstance(loc[1], int)
        parts[1] = _entry_name(sources.value(str(loc[0])), loc[1]) or parts[1]
    return parts


def _entry_name(entries: Any, index: int) -> str | None:
    """Return the name in one entry of the list as it was given; None if it has none."""
    listed = json.loads(entries) if isinstance(entries, str) else entries
    entry = listed[index]
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) and name else None


def shown(value: Any) -> str:
    """Return a value as a user would write it, so without Python's None and True."""
    if value is None:
        return "no value"
    if isinstance(value, tuple) and value:  # of a flag that may be repeated
        text = ", ".join(map(shown, value))
    else:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
