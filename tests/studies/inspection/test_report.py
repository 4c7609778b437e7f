"""`ropewalk inspect` and `ropewalk config check`: numbers that the loaded server confirms."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.rope import native_rope
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.load_service import load_service
from ropewalk.server.startup.planning.dry_run import outlook_of
from ropewalk.studies.inspection.inspected import inspected
from tests.checkpoints.tiny_models import tiny_model
from tests.servers.processes import Server, run_here

TWO = """
deployments:
  - name: demo
    rope_scaling: {rope_type: llama3, factor: 4.0}
  - name: fixed-2x
    rope_scaling: {rope_type: yarn, factor: 2.0}
    rope_policy: fixed
kv_cache_tokens: 1000
port: 9999
"""


def inspect(*arguments: str) -> dict[str, Any]:
    """The JSON of `ropewalk inspect`."""
    ended = run_here("inspect", "--json", *arguments)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_costs_are_those_of_the_config() -> None:
    """The bytes of a token, and the tokens that fit beside the weights, are compared."""
    costs = inspect("--memory-gib", "0.02")["costs"]
    config = json.loads((Path(EMBEDDED_MODEL) / "config.json").read_text())
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    assert costs["kv_bytes_per_token"] == config["num_hidden_layers"] * per_layer
    left = 0.02 * 2**30 - costs["weight_bytes"]
    assert costs["memory_holds_tokens"] == left // costs["kv_bytes_per_token"] // 64 * 64
    assert costs["longest_context_in_memory"] == min(2048, costs["memory_holds_tokens"])
    tight = inspect("--memory-gib", "0.016")["costs"]
    assert 0 < tight["longest_context_in_memory"] == tight["memory_holds_tokens"] < 2048


def test_a_memory_in_which_nothing_fits_ends_with_code_2() -> None:
    """The report is still printed. This memory holds the weights, but no page beside them."""
    ended = run_here("inspect", "--json", "--memory-gib", "0.015")
    costs = json.loads(ended.stdout)["costs"]
    assert costs["longest_context_in_memory"] == 0
    assert costs["weight_bytes"] < 0.015 * 2**30
    assert ended.returncode == 2
    assert "and a page of the cache (64 tokens, 256 KiB), got 0.015" in ended.stderr
    text = run_here("inspect", "--memory-gib", "0.015").stdout
    assert "0 tokens: the weights leave no room for a page of the cache" in text


def test_a_model_with_tables_by_layer_type_says_which_is_scaled(tmp_path: Path) -> None:
    """Gemma 3 is a model with tables by layer type."""
    model = tiny_model("gemma3_text").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED_MODEL / "tokenizer.json").read_bytes())
    ended = run_here("inspect", str(tmp_path), "--dtype", "bfloat16")
    assert ended.returncode == 0, ended.stderr
    assert "not scaled       layers of type sliding_attention keep their own table" in ended.stdout
    assert "512 bytes a token: 4 layers x 2 heads x (16 + 16) in bfloat16" in ended.stdout
    disk = f"kv_disk: {tmp_path / 'disk'}\nkv_disk_gib: 1\n"
    (tmp_path / "settings.yaml").write_text(f"kv_cache_dtype: int8\n{disk}")
    costs = inspect(str(tmp_path), "--config", str(tmp_path / "settings.yaml"))["costs"]
    assert costs["kv_stage_bytes"] > 0
    assert costs["kv_windows_not_held"] is None
    assert costs["kv_windows"] == "of 4 layers 3 keep 24 tokens"


def test_config_check_says_what_serve_says(server: Server, tmp_path: Path) -> None:
    """For the embedded model, the lines are those of the banner."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("port: 8001\n")
    ended = run_here("config", "check", str(file))
    assert ended.returncode == 0, ended.stderr
    start, end = "  deployment ", "  self-check "
    banner = server.banner[server.banner.index(start) : server.banner.index(end)]
    assert "  kernels  " in banner
    assert banner in ended.stdout


def test_config_check_names_deployments_tiers_context_and_memory(tmp_path: Path) -> None:
    """A context limited by the cache is marked."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(TWO)
    ended = run_here("config", "check", str(file))
    for line in (
        "deployment       demo",
        "scaling        llama3, by_position",
        "tiers          256:1x 512:2x 1024:4x",
        "longest        960 tokens (the size of the KV cache)",
        "deployment       fixed-2x",
        "tiers          512:2x",
        "longest        512 tokens\n",
        "KV cache         960 tokens",
        "weights, 3.75 MiB cache",
        "would listen on  127.0.0.1, port 9999",
        "whether the architecture can be taken over: loading it shows",
    ):
        assert line in ended.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat_template: ./none.jinja", "chat_template: cannot read none.jinja: No such file"),
        ("allowed_chat_template_kwargs: [messages]", "messages is the rendering's own"),
        ("model: ./none", "there is no folder ./none"),
        ("kv_cache_tokens: 3", "must have at least one page"),
        (
            "deployments: [{name: a}, {name: b, rope_tiers: [2, 4]}]",
            "deployments: b: rope_tiers: must rise strictly from 1, got 2,4",
        ),
        (
            "kv_cache_tokens: 1000\ndeployments: [{name: a, max_model_len: 2000}]",
            "deployments: a: max_model_len must be <= the size of the KV cache (960 tokens)",
        ),
    ],
)
def test_config_check_refuses_what_serve_would_refuse(
    tmp_path: Path, text: str, message: str
) -> None:
    """Config check and serve refuse with the same sentence."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(text)
    told = []
    for look in (outlook_of, load_service):
        with pytest.raises((SettingsError, ModelError)) as raised:
            look(load_settings({"config": str(file)}))
        told.append(str(raised.value))
    assert told[0] == told[1]
    assert message in told[0]


def test_config_check_knows_the_machines_memory(tmp_path: Path) -> None:
    """Serve would fail in an allocation with torch's message without this check."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("kv_cache_gib: 100000")
    with pytest.raises(SettingsError, match=r"weights and KV cache need 100000 GiB, this machine"):
        outlook_of(load_settings({"config": str(file)}))


def test_inspect_asks_nothing_of_this_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may describe another machine."""
    monkeypatch.setenv("ROPEWALK_KV_CACHE_TOKENS", "8")
    assert inspect("--max-model-len", "2000")["costs"]["longest_context"] == 2000


@pytest.mark.parametrize(
    "command", [("config", "check", "ropewalk.yaml"), ("inspect", ".")], ids=lambda each: each[0]
)
def test_wrong_dual_chunk_attention_is_refused_before_a_checkpoint_is_loaded(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The embedded model's config has here a block like Qwen2.5-7B-Instruct-1M's."""
    for file in EMBEDDED_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    values["dual_chunk_attention_config"] = {
        "chunk_size": 64,
        "original_max_position_embeddings": 64,
    }
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "ropewalk.yaml").write_text(f"model: {tmp_path}")
    *words, last = command
    ended = run_here(*words, str(tmp_path / last))
    assert ended.returncode == 2
    assert ended.stderr == (
        "ropewalk: LlamaForCausalLM: dual_chunk_attention_config.local_size: must be an integer >= "
        "1, got None\n"
    )


def test_pairs_that_stand_still_have_no_row() -> None:
    """A quarter of Gemma 4's pairs rotate; the others have no wavelength."""
    block = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    config = {"max_position_embeddings": 256, "head_dim": 64, "rope_parameters": block}
    native = native_rope(config)
    deployment = make_deployment("m", native)
    found = inspected(deployment, native, {})
    tiers = found.as_json()["tiers"]
    assert {len(tier["pairs"]) for tier in tiers} == {8}
    assert tiers[0]["pairs"][7]["wavelength"] == pytest.approx(2 * math.pi * 1e6 ** (14 / 64))
    lines = found.table_lines()
    assert [line.split()[0] for line in lines[3:]] == [str(pair) for pair in range(8)]


def test_wavelengths_and_states_are_yarns_formula() -> None:
    """Above 32 turns within L pairs are kept, below 1 interpolated, else blended.

    The formula is that of arXiv 2309.00071.
    """
    found = inspect()
    assert found["native_len"] == 256
    tiers = found["deployments"][0]["tiers"]
    assert [(tier["ceiling"], tier["factor"]) for tier in tiers] == [
        (256, 1.0),
        (512, 2.0),
        (1024, 4.0),
        (2048, 8.0),
    ]
    for tier in tiers:
        factor = tier["factor"]
        assert tier["attention_factor"] == pytest.approx(0.1 * math.log(factor) + 1)
        for pair, shown in enumerate(tier["pairs"]):
            native = 2 * math.pi * 10_000 ** (2 * pair / 64)
            turns = 256 / native
            assert shown["ratio"] == pytest.approx(shown["wavelength"] / native, rel=1e-5)
            if factor == 1 or turns > 32:
                assert (shown["state"], round(shown["ratio"], 4)) == ("kept", 1)
            elif turns < 1:
                assert shown["state"] == "interpolated"
                assert shown["ratio"] == pytest.approx(factor, rel=1e-5)
            else:
                assert shown["state"] == "blended"
                assert 1 < shown["ratio"] < factor
