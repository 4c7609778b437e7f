"""The command: its help, its banner, and its end if it cannot serve."""

import re
import shutil
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from ropewalk.cli import ropewalk
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.text import template_renderer
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.server.startup.gate import listening_socket
from ropewalk.server.startup.load_service import load_service
from ropewalk.server.startup.planning.dry_run import refuse_ahead
from tests.servers.processes import Server, run_here, run_to_end


def test_help_lists_every_setting() -> None:
    """Each setting is shown as a flag and as a variable."""
    text = run_here("serve", "--help").stdout
    for name in ServeSettings.model_fields:
        if name != "model":
            assert re.search(rf"--{name.replace('_', '-')}[ ,]", text)
            assert f"ROPEWALK_{name.upper()}" in text


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(("serv",), " Did you mean `serve`?"), (("config", "chek"), " Did you mean `check`?")],
)
def test_a_misspelt_command_is_told_the_nearest_one(arguments: tuple[str, ...], hint: str) -> None:
    """A name that is like none has no hint."""
    ended = CliRunner().invoke(ropewalk, [*arguments])
    assert ended.exit_code == 2
    assert ended.stderr.endswith(f"Error: No such command {arguments[-1]!r}.{hint}\n")
    ended = CliRunner().invoke(ropewalk, ["zzz"])
    assert ended.stderr.endswith("Error: No such command 'zzz'.\n")


def test_banner_says_what_an_operator_needs(server: Server) -> None:
    """The banner states the model, its lengths, the tiers, the cache and the address."""
    for line in (
        "model            LlamaForCausalLM, cpu, float32",
        "deployment       ropewalk-demo",
        "native length  256 tokens",
        "tiers          256:1x 512:2x 1024:4x 2048:8x",
        "longest        2048 tokens",
        "KV cache         65536 tokens, 256 MiB in 1024 pages of 64",
        f"listening on     {server.url}",
    ):
        assert line in server.banner


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rope_scaling": '{"rope_type": "yarn"}'}, "rope_scaling: factor: is missing"),
        ({"rope_scaling": '{"rope_type": ["yarn"]}'}, "rope_scaling: rope_type: must be a string"),
        ({"rope_scaling": '{"rope_type": "yarn", "factor": 1e308}'}, "must be <= 65536"),
        (
            {"rope_scaling": '{"rope_type": "yarn", "factor": 2, "partial_rotary_factor": 0.5}'},
            "partial_rotary_factor: is 1 in the model",
        ),
        ({"rope_scaling": '{"rope_type": "yarn", "factor": 2, "x": 1}'}, "x: is not a field"),
        ({"rope_tiers": "2,4"}, "rope_tiers: must rise strictly from 1, got 2,4"),
        ({"rope_tiers": "1,2", "rope_policy": "fixed"}, "rope_tiers: has no meaning"),
        ({"allowed_rope_types": "yarn,magic"}, "allowed_rope_types: accepts .*; got 'magic'"),
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
        (["--rope-tiers", "2,4"], "rope_tiers: must rise strictly from 1, got 2,4"),
        (["./not-there"], "there is no folder ./not-there"),
        (["/" + "a" * 300], "there is no folder /aaa"),
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


def test_a_wrong_template_and_wrong_deployments_are_told_at_once(tmp_path: Path) -> None:
    """Before the port opens."""
    (tmp_path / "chat.jinja").write_text("{% for %}")
    deployments = '[{"name": "a", "max_model_len": 99999999}]'
    ended = run_to_end(
        *("serve", "--port", "0", "--deployments", deployments),
        *("--chat-template", str(tmp_path / "chat.jinja")),
    )
    assert ended.returncode == 2
    first, second = (each for each in ended.stderr.splitlines() if each.startswith("ropewalk: "))
    assert first.startswith("ropewalk: the chat template, line 1: ")
    assert second.startswith("ropewalk: deployments: a: max_model_len: ")


def test_a_broken_checkpoint_ends_with_a_sentence_and_code_2(tmp_path: Path) -> None:
    """The folder of a broken checkpoint may come from the environment."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "tokenizer.json").unlink()
    ended = run_to_end("serve", env={"ROPEWALK_MODEL": str(folder)})
    assert ended.returncode == 2
    assert f"ropewalk: {folder} has no tokenizer.json" in ended.stderr


def test_a_chat_template_without_end_ends_with_a_sentence_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the checkpoint; `serve` refuses it before the weights, as `config check`."""
    monkeypatch.setattr(template_renderer, "SECONDS", 0.2)
    folder, file = tmp_path / "model", tmp_path / "ropewalk.yaml"
    shutil.copytree(EMBEDDED_MODEL, folder)
    inner = "{% for j in range(99999) %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(
        "{% for i in range(99999) %}" + inner + "{% endfor %}"
    )
    file.write_text(f"model: {folder}\n")
    told = "the chat template takes more than 0.2 seconds of processor time on a short conversation"
    with pytest.raises(ModelError, match=told):
        refuse_ahead(load_settings({"model": str(folder)}))
    ended = run_here("config", "check", str(file))
    assert ended.returncode == 2
    assert f"ropewalk: {told}\n" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_an_error_of_a_library_while_a_model_is_loaded_is_a_sentence() -> None:
    """The number type, the device, the reason and another setting are named.

    A traceback is printed only with ROPEWALK_TRACEBACK.
    """
    ended = run_to_end("serve", "--dtype", "bfloat16", "--port", "0", module="tests.server.unfit")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    sentence = "cannot be served with dtype bfloat16 on device cpu: RuntimeError: needs avx512bw"
    assert f"{sentence}; try dtype float32" in ended.stderr
    shown = run_to_end(
        *("serve", "--dtype", "bfloat16", "--port", "0"),
        env={"ROPEWALK_TRACEBACK": "1"},
        module="tests.server.unfit",
    )
    assert "Traceback" in shown.stderr
    assert "in refuse" in shown.stderr


def test_tokens_are_sent_without_nagles_delay() -> None:
    """Asyncio turns Nagle off only if the listening socket's protocol is TCP."""
    listener = listening_socket(load_settings({"port": "0"}))
    with listener:
        assert listener.proto == socket.IPPROTO_TCP
