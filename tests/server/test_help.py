"""Help texts: whole words at every width, and no words that only this project knows."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ropewalk.cli import ropewalk
from ropewalk.server.settings.flags import FIRST

COMMANDS = (["serve"], ["inspect"], ["bench"], ["eval"], ["config", "check"])


def help_of(command: list[str], width: int) -> str:
    """The help of a command in a terminal of some width."""
    result = CliRunner().invoke(ropewalk, [*command, "--help"], terminal_width=width)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_word_is_cut_at_any_width(command: list[str]) -> None:
    """The words of a narrow terminal are those of a wide one, in the same order."""
    wide = help_of(command, 200).split()
    for width in (30, 50, 62, 80, 100):
        assert help_of(command, width).split() == wide, width


def test_lines_are_as_long_as_the_terminal_or_hold_one_word() -> None:
    """A variable that is longer than a line stands alone, so that it can be copied.

    The flags of a setting stand on one line.
    """
    for width in (50, 80):
        for line in help_of(["serve"], width).splitlines():
            is_flags = line.startswith("  -")
            assert len(line) <= width or len(line.split()) == 1 or is_flags, line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_lists_have_spaces_after_their_commas(command: list[str]) -> None:
    """A list of names without spaces is one word, which no line has room for."""
    for word in help_of(command, 100).split():
        assert sum(part.isalpha() and part.islower() for part in word.split(",")) < 3, word


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_needs_no_glossary(command: list[str]) -> None:
    """These phrases were met without an explanation."""
    text = " ".join(help_of(command, 100).split())
    for phrase in ("Left out:", "so long", "so much of it", "Those below", "L in tokens", "ends w"):
        assert phrase.lower() not in text.lower()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_values_have_names_of_the_field_and_not_of_python(command: list[str]) -> None:
    """click shows `INTEGER RANGE` for an option without a name of its own."""
    text = help_of(command, 100)
    for word in ("INTEGER", "FLOAT", "RANGE", "DIRECTORY"):
        assert word not in text


def test_the_settings_to_know_first_come_first() -> None:
    """In the help of `serve`, once each, and in the table of the page."""
    text = help_of(["serve"], 100)
    first = text.partition("Ten to know first:\n")[2].partition("\n\n")[0]
    flags = [f"--{name.replace('_', '-')}" for name in FIRST]
    lines = re.findall(r"^  (-.*)", first, re.MULTILINE)
    assert len(lines) == len(flags)
    assert all(flag in re.split("[, ]+", line) for flag, line in zip(flags, lines, strict=True))
    assert all(
        len(re.findall(rf"^  (?:-.*, )?{flag}\b", text, re.MULTILINE)) == 1 for flag in flags
    )
    page = (Path(__file__).parents[2] / "docs/reference/settings.md").read_text()
    table = page.partition("## Ten to know first")[2].partition("\n## ")[0]
    assert all(f"`{flag}`" in table for flag in flags)
