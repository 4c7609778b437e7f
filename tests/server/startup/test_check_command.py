"""`config check` refuses what `serve` would refuse before it loads a model."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.startup.check_command import check


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 // 0 }}", "fails on a plain conversation: ZeroDivisionError: "),
        ("{{ raise_exception('not\\n you') }}", "fails on a plain conversation: not you"),
        ("Be kind.", "writes the same prompt for different messages"),
        ("{{ bos_token + messages[0].content }}", None),
    ],
)
def test_a_template_that_no_chat_passes_is_told(
    tmp_path: Path, template: str, told: str | None
) -> None:
    """It refuses nothing, because completions work. Special tokens are those of the tokenizer."""
    (tmp_path / "chat.jinja").write_text(template)
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"chat_template: {tmp_path / 'chat.jinja'}\ndevice: cpu\n")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 0
    if told is None:
        assert "warning" not in ended.stdout
    else:
        assert f"  warning          the chat template {told}" in ended.stdout


def test_the_file_may_be_named_by_a_flag(tmp_path: Path) -> None:
    """One file is named, as an argument or as `serve` takes it."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text("device: cpu\nkv_cache_tokens: 4096\n")
    one, other = (CliRunner().invoke(check, [*flag, str(path)]) for flag in ([], ["--config"]))
    assert one.exit_code == other.exit_code == 0
    assert one.stdout.splitlines()[:5] == other.stdout.splitlines()[:5]
    for arguments, told in (
        ([], "name a MODEL or a FILE"),
        ([str(path), "--config", str(path)], "name one FILE"),
    ):
        ended = CliRunner().invoke(check, arguments)
        assert ended.exit_code == 2
        assert told in ended.stderr


def test_a_model_is_checked_as_inspect_shows_it(tmp_path: Path) -> None:
    """A folder, with flags of `serve` and beside a file of settings; one that is absent, too."""
    model = str(EMBEDDED_MODEL)
    ended = CliRunner().invoke(check, [model, "--kv-cache-tokens", "4096", "--device", "cpu"])
    assert ended.exit_code == 0, ended.stderr
    assert "KV cache         4096 tokens" in ended.stdout
    path = tmp_path / "ropewalk.yaml"
    path.write_text("device: cpu\nkv_cache_tokens: 2048\n")
    ended = CliRunner().invoke(check, [model, "--config", str(path)])
    assert "KV cache         2048 tokens" in ended.stdout
    for flag in ((), ("--model",), ("-m",)):  # as `serve` takes it
        ended = CliRunner().invoke(check, [*flag, "/no/such/model"])
        assert ended.exit_code == 2
        assert "there is no folder /no/such/model" in ended.stderr


def test_deployments_that_are_longer_than_the_cache_are_reported_together(tmp_path: Path) -> None:
    """Each has a line of its own."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text("""
deployments:
  - {name: a, max_model_len: 512, rope_scaling: {rope_type: yarn, factor: 8}}
  - {name: b, max_model_len: 1024, rope_scaling: {rope_type: yarn, factor: 8}}
kv_cache_tokens: 256
""")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    first, second = ended.stderr.splitlines()
    assert first.startswith("ropewalk: deployments: a: max_model_len")
    assert second.startswith("ropewalk: deployments: b: max_model_len")


def test_wrong_files_and_deployments_are_reported_together(tmp_path: Path) -> None:
    """Of a deployment, the first wrong field is reported."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text("""
api_key_file: /nowhere/keys
ssl_certfile: /nowhere/cert.pem
chat_template: /nowhere/template.jinja
deployments:
  - name: a
    rope_scaling: {rope_type: yarn, factor: 8.0, mscale: -1}
    max_rope_factor: 3000
  - name: b
    max_model_len: 1000000
""")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    beginnings = [
        *("api_key_file: cannot read", "ssl_certfile: cannot use", "chat_template: cannot read"),
        "deployments: a: rope_scaling: mscale: must be >= 0, got -1.0",
        "deployments: b: max_model_len: must be <= the longest tier (",
    ]
    told = ended.stderr.splitlines()
    assert len(told) == len(beginnings), told
    for line, beginning in zip(told, beginnings, strict=True):
        assert line.startswith(f"ropewalk: {beginning}")


def test_a_card_that_is_not_here_is_planned_for(tmp_path: Path) -> None:
    """Weights, cache and the longest context are those of its memory; too little is refused."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text("max_num_seqs: 4\n")
    ended = CliRunner().invoke(check, [str(path), "--gpu-memory-gib", "0.03"])
    assert ended.exit_code == 0, ended.output
    assert "LlamaForCausalLM, cuda" in ended.stdout
    assert "of 30.7 MiB (planned: `serve` sizes the cache by a step)" in ended.stdout
    tight = CliRunner().invoke(check, [str(path), "--gpu-memory-gib", "0.01"])
    assert "(the size of the KV cache)" in tight.stdout
    small = CliRunner().invoke(check, [str(path), "--gpu-memory-gib", "0.001"])
    assert small.exit_code == 2
    assert "no room for a page of the KV cache beside" in small.stderr


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """The lines about threads, kernels and memory are the machine's."""
    page = (Path(__file__).parents[3] / "docs/reference/settings.md").read_text()
    before, sample = page.split("ropewalk config check ropewalk.yaml\n", 1)
    path = tmp_path / "ropewalk.yaml"
    path.write_text(before.rpartition("<<'YAML'\n")[2].removesuffix("YAML\n"))
    path.write_text(path.read_text() + "device: cpu\nkv_cache_tokens: 65536\n")
    shown = sample.split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    printed = CliRunner().invoke(check, [str(path)]).stdout.splitlines()
    assert len(shown) == len(printed) > 15
    for one, other in zip(shown, printed, strict=True):
        is_machines = one.startswith(("  model ", "  kernels ", "  memory "))
        assert one == other or (is_machines and one[:19] == other[:19])
