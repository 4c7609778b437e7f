"""Commands that must answer at once import nothing heavy; each runs in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.cli import _COMMANDS, _CONFIG_COMMANDS, ropewalk

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    *("torch", "transformers", "huggingface_hub", "numba"),
    *("fastapi", "uvicorn", "matplotlib", "scipy"),
)
# Of a server whose port answers; uvicorn is all that it needs.
HEAVY_OF_A_LOAD = (*(name for name in HEAVY if name != "uvicorn"), "starlette")
SETTINGS = ("pydantic", "pydantic_settings", "yaml", "structlog", "numpy", "asyncio")
_PROGRAM = """
import sys
from ropewalk.__main__ import main
try:
    main()
except SystemExit as end:
    code = end.code or 0
found = [name for name in {names!r} if name in sys.modules]
sys.stderr.write(f"\\ncode {{code}} imported {{found}}\\n")
"""


def run(
    *arguments: str, names: tuple[str, ...] = HEAVY, env: dict[str, str] | None = None
) -> tuple[str, str]:
    """The output of a command, and its last line: the exit code and what it imported."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(names=names), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
    )
    return ended.stdout + ended.stderr, ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("config", "--help"), ("no-such-command",)]
)
def test_the_list_of_commands_needs_no_settings(arguments: tuple[str, ...]) -> None:
    """Neither a library of the server nor one of the settings is imported."""
    _, last = run(*arguments, names=HEAVY + SETTINGS)
    assert last == f"code {2 if arguments[0] == 'no-such-command' else 0} imported []"


def test_a_shell_completes_commands_without_settings() -> None:
    """The names of the commands are known without their modules."""
    asked = {"_ROPEWALK_COMPLETE": "bash_complete", "COMP_WORDS": "ropewalk in", "COMP_CWORD": "1"}
    output, last = run(env=asked, names=HEAVY + SETTINGS)
    assert "plain,inspect" in output
    assert last == "code 0 imported []"


def test_a_shell_completes_flags_without_torch() -> None:
    """The flags of `serve` need the settings only."""
    words = {"COMP_WORDS": "ropewalk serve --kv", "COMP_CWORD": "2"}
    output, last = run(env={"_ROPEWALK_COMPLETE": "bash_complete", **words})
    assert "plain,--kv-cache-gib" in output
    assert last == "code 0 imported []"


@pytest.mark.parametrize("arguments", [("serve", "--help"), ("serve", "--port", "x")])
def test_settings_need_no_torch(arguments: tuple[str, ...]) -> None:
    """A wrong setting is refused before anything is loaded."""
    _, last = run(*arguments)
    assert last == f"code {2 if 'x' in arguments else 0} imported []"


def test_a_wrong_key_is_found_before_anything_is_imported(tmp_path: Path) -> None:
    """The sentence names the key."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("max_num_sqs: 8\n")
    output, last = run("config", "check", str(file), names=(*HEAVY, "numpy", "tokenizers"))
    assert "max_num_sqs" in output
    assert last == "code 2 imported []"


def test_serve_tells_an_absent_model_before_the_port_opens() -> None:
    """No client sees a server that is loading and then ends."""
    output, last = run("serve", "--port", "0", "/nonexist")
    assert output.startswith("ropewalk: there is no folder /nonexist")
    assert last == "code 2 imported []"


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    """A short help is the first sentence of the command's own help."""
    for group, entries in ((ropewalk, _COMMANDS), (ropewalk.commands["config"], _CONFIG_COMMANDS)):
        for name, entry in entries.items():
            command = group.get_command(None, name)
            assert command is not None
            assert command.name == name
            assert str(command.help).startswith(entry.short_help)
