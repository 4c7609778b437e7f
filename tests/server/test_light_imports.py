"""Commands that must answer at once import nothing heavy; each runs in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.cli import _COMMANDS, _CONFIG_COMMANDS, ropewalk
from ropewalk.model_runtime.formats.gguf.gguf_config import llama3_divisors_P
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written

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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("/nonexist",), "there is no folder /nonexist"),
        (("--rope-tiers", "2,4"), "rope_tiers: must rise strictly from 1, got 2,4"),
        (("--rope-scaling", '{"rope_type": "yran"}'), "rope_scaling: rope_type: must be one of "),
        (("--model-aliases", '{"a": "b"}'), "model_aliases: 'a' must name one of ropewalk-demo"),
    ],
)
def test_serve_tells_wrong_deployments_before_the_port_opens(
    arguments: tuple[str, ...], sentence: str
) -> None:
    """No client sees a server that is loading and then ends."""
    output, last = run("serve", "--port", "0", *arguments)
    assert output.startswith(f"ropewalk: {sentence}")
    assert last == "code 2 imported []"


def test_config_check_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """The first check on a machine tries its products, and later ones remember them."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("max_num_seqs: 8\ndevice: cpu\n")
    first, _ = run("config", "check", str(file))
    output, last = run("config", "check", str(file))
    assert last == "code 0 imported []"
    printed, before = (
        [line for line in each.splitlines() if "free now" not in line] for each in (output, first)
    )
    assert len(printed) == len(output.splitlines()) - 1
    assert printed[:-2] == before[:-2]


@pytest.mark.costly
def test_config_check_of_a_gguf_file_needs_neither(tmp_path: Path) -> None:
    """Not even for Llama 3.1's scaling, which is found from a tensor."""
    divisors = llama3_divisors_P(16, 10_000.0, 8.0, (8192, 1.0, 4.0)).astype("float32")
    case = next(case for case in CASES if case.name == "llama")
    model = case.write(tmp_path / "m.gguf", Written(tensors={"rope_freqs.weight": divisors}))
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {model}\nkv_cache_tokens: 2048\ndevice: cpu\n")
    run("config", "check", str(file))  # the first check on a machine tries its products
    output, last = run("config", "check", str(file))
    assert "scaling        llama3" in output
    assert last == "code 0 imported []"


@pytest.mark.costly
@pytest.mark.parametrize("size", ["kv_cache_gib: 1000000", "kv_cache_tokens: 1000000000000"])
def test_serve_refuses_a_cache_beyond_the_memory_at_once(tmp_path: Path, size: str) -> None:
    """The words are those of `config check`, and torch would take seconds."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"{size}\ndevice: cpu\n")
    checked, _ = run("config", "check", str(file))
    served, last = run("serve", "--port", "0", "--config", str(file), names=HEAVY_OF_A_LOAD)
    assert last == "code 2 imported []"
    name = size.partition(":")[0]
    (sentence,) = (line for line in served.splitlines() if line.startswith("ropewalk: "))
    assert sentence.startswith(f"ropewalk: {name}: weights and KV cache need ")
    assert "this machine has " in sentence
    assert sentence in checked.splitlines()


@pytest.mark.costly
def test_inspect_needs_no_transformers() -> None:
    """The tables are computed with torch, as in the server."""
    names = ("transformers", "huggingface_hub", "numba", "fastapi", "uvicorn", "matplotlib")
    output, last = run("inspect", "--device", "cpu", names=names)
    assert "32 pairs, base 10000" in output
    assert last == "code 0 imported []"


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    """A short help is the first sentence of the command's own help."""
    for group, entries in ((ropewalk, _COMMANDS), (ropewalk.commands["config"], _CONFIG_COMMANDS)):
        for name, entry in entries.items():
            command = group.get_command(None, name)
            assert command is not None
            assert command.name == name
            assert str(command.help).startswith(entry.short_help)
