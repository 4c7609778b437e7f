"""The Dockerfile and .dockerignore, read as the builder reads them.

Only what our own files use is understood; anything else is an error rather than a guess.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN",
    "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:[-+])([^}]*))?\})")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    name: str
    flags: Mapping[str, str]
    text: str

    def words(self) -> list[str]:
        """The text as a shell splits it."""
        return shlex.split(self.text)

    def argv(self) -> list[str]:
        """The exec form, ["command", "argument"]; the shell form is refused."""
        argv = json.loads(self.text)
        assert isinstance(argv, list), self.text
        return argv


@dataclass(frozen=True)
class Stage:
    """FROM base AS name, and what follows."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Dockerfile:
    """Arguments given before the first FROM, and the stages."""

    args: Mapping[str, str]
    stages: list[Stage]

    def all(self, name: str) -> list[Instruction]:
        """Every instruction of that name, in order."""
        return [each for stage in self.stages for each in stage.instructions if each.name == name]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-otherwise} and ${NAME:+instead}; unknown ones are empty."""

    def value(found: re.Match[str]) -> str:
        name, operator, word = found[1] or found[2], found[3], found[4]
        current = variables.get(name, "")
        if operator == ":-":
            return current or word
        return (word if current else "") if operator == ":+" else current

    return _VARIABLE.sub(value, text)


def parse(text: str) -> Dockerfile:
    """Parse; comments inside continuation lines are dropped, as the builder does."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    args: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction = _instruction(line)
        if instruction.name == "FROM":
            base, *named = instruction.text.split()
            assert not named or named[0] == "AS", line
            stages.append(Stage(expand(base, args), named[1] if named else "final"))
        elif stages:
            stages[-1].instructions.append(instruction)
        else:
            assert instruction.name == "ARG", line
            args.update([argument(instruction)])
    return Dockerfile(args, stages)


def argument(instruction: Instruction) -> tuple[str, str]:
    """ARG's name and default."""
    name, _, default = instruction.text.partition("=")
    return name, default


def _instruction(line: str) -> Instruction:
    name, _, rest = line.partition(" ")
    assert name in KNOWN, f"this reader does not know {name}"
    flags = {}
    while found := re.match(r"--([a-z-]+)=(\S+)\s+", rest := rest.lstrip()):
        flags[found[1]] = found[2]
        rest = rest[found.end() :]
    return Instruction(name, flags, rest)


class Ignored:
    """The patterns of .dockerignore; the last pattern that fits a path decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._rules = [
            (re.compile(_pattern(line.removeprefix("!"))), not line.startswith("!"))
            for line in lines
            if line and not line.startswith("#")
        ]

    def __call__(self, path: Path) -> bool:
        """Whether a path relative to the context is ignored; a folder's pattern fits its files."""
        names = ["/".join(path.parts[:end]) for end in range(1, len(path.parts) + 1)]
        ignored = False
        for rule, keeps_out in self._rules:
            if any(rule.fullmatch(name) for name in names):
                ignored = keeps_out
        return ignored

    def kept(self, root: Path, paths: Iterable[Path]) -> list[Path]:
        """The files among paths, and in folders among them, that reach the builder."""
        files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
        return [file for file in files if file.is_file() and not self(file.relative_to(root))]


def _pattern(line: str) -> str:
    escaped = re.escape(line.strip("/"))
    escaped = escaped.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return escaped.replace(r"\?", "[^/]")
