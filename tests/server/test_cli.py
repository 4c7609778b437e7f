"""The command: its help, and its end if it cannot serve."""

import re
import shutil
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from ropewalk.cli import ropewalk
from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.server.startup.gate import listening_socket
from ropewalk.server.startup.load_service import load_service
from tests.servers.processes import run_here, run_to_end


def test_help_lists_every_setting() -> None:
    """Each setting is shown as a flag and as a variable."""
    text = run_here("serve", "--help").stdout
    for name in ServeSettings.model_fields:
        if name != "model":
            assert re.search(rf"--{name.replace('_', '-')}[ ,]", text)
            assert f"ROPEWALK_{name.upper()}" in text


@pytest.mark.parametrize("command", [["serve"], ["bench"], ["config", "check"]], ids=" ".join)
def test_no_word_of_a_help_is_cut_at_any_width(command: list[str]) -> None:
    """The words of a narrow terminal are those of a wide one, in the same order."""
    runner, asked = CliRunner(), [*command, "--help"]
    wide = runner.invoke(ropewalk, asked, terminal_width=200).stdout.split()
    for width in (30, 62, 100):
        assert runner.invoke(ropewalk, asked, terminal_width=width).stdout.split() == wide, width


def test_a_misspelt_command_is_told_the_nearest_one() -> None:
    """Also one of a group."""
    ended = CliRunner().invoke(ropewalk, ["config", "chek"])
    assert ended.exit_code == 2
    assert ended.stderr.endswith("Error: No such command 'chek'. Did you mean `check`?\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rope_scaling": '{"rope_type": "yarn"}'}, "rope_scaling: factor: is missing"),
        (
            {"rope_scaling": '{"rope_type": "yarn", "factor": 2, "partial_rotary_factor": 0.5}'},
            "partial_rotary_factor: is 1 in the model",
        ),
        ({"rope_tiers": "2,4"}, "rope_tiers: must rise strictly from 1, got 2,4"),
        ({"rope_tiers": "1,2", "rope_policy": "fixed"}, "rope_tiers: has no meaning"),
        ({"allowed_rope_types": "yarn,magic"}, "allowed_rope_types: accepts .*; got 'magic'"),
        ({"allowed_rope_types": "linear"}, "allowed_rope_types: must contain yarn, the method"),
        (
            {"deployments": '[{"name": "a"}, {"name": "b", "max_rope_factor": 9}]'},
            "^deployments: b: max_rope_factor: must be <= 8, the factor of the longest tier; got 9",
        ),
        ({"max_model_len": "4096"}, r"max_model_len: must be <= the longest tier \(2048 tokens\)"),
        (
            {"max_model_len": "2048", "kv_cache_tokens": "1000"},
            r"max_model_len must be <= the size of the KV cache \(960 tokens\), got 2048",
        ),
        (
            {
                "rope_scaling": '{"rope_type": "default", "positions": {"method": "sinks"}}',
                "max_model_len": "2048",
                "kv_cache_tokens": "1000",
                "max_num_batched_tokens": "500",
            },
            r"sinks needs 1016 tokens for any length: 260 that it keeps, 500 of .* four pages",
        ),
        (
            {"kv_cache_tokens": "15"},
            "kv_cache_tokens: must have at least one page of 64 tokens",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    flags: dict[str, str], message: str
) -> None:
    """The message names the field of the setting or of the rope block."""
    with pytest.raises(SettingsError, match=message):
        load_service(load_settings(flags))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rope-policy", "magic"], "rope_policy: must be by_position, "),
        (["--host", "300.1.1.1"], "cannot listen on host 300.1.1.1, port 8000: "),
        (["./not-there"], "there is no folder ./not-there"),
        (["--chat-template", "/nowhere.jinja"], "chat_template: cannot read /nowhere.jinja: "),
    ],
)
def test_a_setting_that_cannot_be_served_ends_with_a_sentence_and_code_2(
    arguments: list[str], message: str
) -> None:
    """A model that cannot be served ends the command without a traceback."""
    ended = run_to_end("serve", *arguments)
    assert ended.returncode == 2
    assert f"ropewalk: {message}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_broken_checkpoint_ends_with_a_sentence_and_code_2(tmp_path: Path) -> None:
    """The folder of a broken checkpoint may come from the environment."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "tokenizer.json").unlink()
    ended = run_to_end("serve", env={"ROPEWALK_MODEL": str(folder)})
    assert ended.returncode == 2
    assert f"ropewalk: {folder} has no tokenizer.json" in ended.stderr


def test_an_error_of_a_library_while_a_model_is_loaded_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number type, the device, the reason and another setting are named.

    A traceback is printed only with ROPEWALK_TRACEBACK.
    """

    def refuse(*_: object) -> None:
        raise RuntimeError("needs avx512bw")  # as oneDNN did with bfloat16

    monkeypatch.setattr(packed_linear, "pack", refuse)
    command = ("config", "check", "--load", "--device", "cpu", "--dtype", "bfloat16")
    ended = run_here(*command)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    sentence = "cannot be served with dtype bfloat16 on device cpu: RuntimeError: needs avx512bw"
    assert f"{sentence}; try dtype float32" in ended.stderr
    monkeypatch.setenv("ROPEWALK_TRACEBACK", "1")
    shown = run_here(*command)
    assert "Traceback" in shown.stderr
    assert "in refuse" in shown.stderr


def test_tokens_are_sent_without_nagles_delay() -> None:
    """Asyncio turns Nagle off only if the listening socket's protocol is TCP."""
    listener = listening_socket(load_settings({"port": "0"}))
    with listener:
        assert listener.proto == socket.IPPROTO_TCP
