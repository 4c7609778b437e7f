"""Commands that must answer at once import nothing heavy; each runs in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    *("torch", "transformers", "huggingface_hub", "numba"),
    *("fastapi", "uvicorn", "matplotlib", "scipy"),
)
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
    ("arguments", "names", "code"),
    [
        (("--help",), HEAVY + SETTINGS, 0),
        (("--version",), HEAVY + SETTINGS, 0),
        (("config", "--help"), HEAVY + SETTINGS, 0),
        (("no-such-command",), HEAVY + SETTINGS, 2),
        (("serve", "--help"), HEAVY, 0),
        (("serve", "--port", "x"), HEAVY, 2),
        (("serve", "--port", "0", "/nonexist"), HEAVY, 2),
    ],
)
def test_what_needs_no_model_imports_nothing_heavy(
    arguments: tuple[str, ...], names: tuple[str, ...], code: int
) -> None:
    """The list of commands needs no settings either; a refusal comes before the port opens."""
    _, last = run(*arguments, names=names)
    assert last == f"code {code} imported []"


@pytest.mark.parametrize(
    ("typed", "offered", "names"),
    [("in", "plain,inspect", HEAVY + SETTINGS), ("serve --kv", "plain,--kv-cache-gib", HEAVY)],
)
def test_a_shell_completes_commands_and_flags(
    typed: str, offered: str, names: tuple[str, ...]
) -> None:
    """The names of the commands are known without their modules."""
    words = {"COMP_WORDS": f"ropewalk {typed}", "COMP_CWORD": str(len(typed.split()))}
    output, last = run(env={"_ROPEWALK_COMPLETE": "bash_complete", **words}, names=names)
    assert offered in output
    assert last == "code 0 imported []"


def test_a_wrong_key_is_found_before_anything_is_imported(tmp_path: Path) -> None:
    """The sentence names the key."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("max_num_sqs: 8\n")
    output, last = run("config", "check", str(file), names=(*HEAVY, "numpy", "tokenizers"))
    assert "max_num_sqs" in output
    assert last == "code 2 imported []"
