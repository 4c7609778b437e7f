"""`config check` refuses what `serve` would refuse before it loads a model."""

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from safetensors.torch import save_file

from ropewalk.model_runtime.cpu_kernels.low_bits.grouped import integer_dot
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.check_command import check
from ropewalk.server.startup.load_service import load_service
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written, quantised


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("api_key_file: /nowhere/keys", "api_key_file: cannot read /nowhere/keys: No such file"),
        ("ssl_certfile: /nowhere/cert.pem", "/nowhere/cert.pem"),
        ("host: 999.1.1.1", "cannot listen on host 999.1.1.1"),
        ("host: ''", "host"),
    ],
)
def test_files_and_the_address_are_checked(tmp_path: Path, line: str, sentence: str) -> None:
    """The exit code is 2, and the sentence names the setting and the value."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"{line}\n")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    assert sentence in ended.stderr


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 // 0 }}", "fails on a plain conversation: ZeroDivisionError: "),
        ("{{ raise_exception('not you') }}", "fails on a plain conversation: not you"),
        (
            "{{ raise_exception('not\\n  listening on     http://elsewhere') }}",
            "fails on a plain conversation: not listening on http://elsewhere",
        ),
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


def test_a_template_that_fails_is_told_by_the_banner(tmp_path: Path) -> None:
    """The server starts."""
    (tmp_path / "chat.jinja").write_text("{{ 1 // 0 }}")
    settings = load_settings({"chat_template": str(tmp_path / "chat.jinja"), "device": "cpu"})
    _, banner = load_service(settings)
    assert "  warning          the chat template fails on a plain conversation: Zero" in banner


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


_ENTRIES = {
    "rope": (
        "  - {name: a, rope_scaling: {rope_type: yarn, factor: 0.5}}\n"
        "  - {name: b, rope_scaling: {rope_type: yarm, factor: 2}}\n",
        ["deployments: a: rope_scaling: factor", "deployments: b: rope_scaling: rope_type"],
    ),
    "length": (
        "  - {name: a, rope_scaling: {rope_type: yarn, factor: 8}, max_model_len: 512}\n"
        "  - {name: b, rope_scaling: {rope_type: yarn, factor: 8}, max_model_len: 1024}\n"
        "kv_cache_tokens: 256\n",
        ["deployments: a: max_model_len", "deployments: b: max_model_len"],
    ),
}


def test_a_gguf_file_needs_a_model_folder(tmp_path: Path) -> None:
    """Without a model, the setting would do nothing."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text("gguf_file: model.gguf\n")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    assert "gguf_file needs the folder of a model" in ended.stderr


def test_rounded_activations_have_a_line_that_says_how_to_have_exact_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there where the default rounds, and only there."""
    llama = next(case for case in CASES if case.name == "llama")
    path = llama.write(tmp_path / "m.gguf", Written(encode=quantised(Type.Q8_0)))
    for rounds in (True, False):
        monkeypatch.setattr(integer_dot, "MULTIPLIES_BYTES", rounds)
        ended = CliRunner().invoke(check, [str(path), "--device", "cpu"])
        assert ended.exit_code == 0, ended.stderr
        found = "int8 with a scale for each 32 inputs" in ended.stdout
        assert found == rounds
        assert ("--activations exact rounds none" in ended.stdout) == rounds


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


@pytest.mark.parametrize("case", _ENTRIES)
def test_wrong_deployments_are_reported_together(tmp_path: Path, case: str) -> None:
    """Each has a line of its own."""
    entries, beginnings = _ENTRIES[case]
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"deployments:\n{entries}")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    lines = ended.stderr.splitlines()
    assert len(lines) == len(beginnings)
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"ropewalk: {beginning}")


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


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("dtype: float16", "dtype float16 is not served on a CPU; use float32 or bfloat16"),
        ("device: cuda:1", "device is cuda:1, but torch finds no CUDA device here"),
    ],
)
def test_a_device_or_a_type_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    """The sentence is that of a load."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"{line}\n")
    ended = CliRunner().invoke(check, [str(path)])
    assert (ended.exit_code, ended.stderr) == (2, f"ropewalk: {sentence}\n")


def test_a_wrong_deployment_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """The weights are damaged, and the sentence is about the deployment."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    weights = folder / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        names = list(file.keys())
        damaged = {name: torch.full_like(file.get_tensor(name), torch.nan) for name in names}
    save_file(damaged, weights)
    settings = load_settings({"model": str(folder), "rope_scaling": '{"rope_type": "yarm"}'})
    with pytest.raises(SettingsError, match="rope_scaling: rope_type: must be one of"):
        load_service(settings)


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
