"""Files of models with states: few bits in another order, heads that predict, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_hybrids import logs_of_rates
from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear, ReorderedLinear
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config, load_gguf_model
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.gguf_cases import CASES, Case
from tests.checkpoints.gguf_files import Written, quantised, same_weights
from tests.checkpoints.random_blocks import like
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.servers.processes import run_here

BY_NAME = {case.name: case for case in CASES}
QWEN = BY_NAME["qwen35"]
# A key head has several value heads, and blocks of 256 inputs hold values of several heads.
WIDE = {"hidden_size": 256, "linear_num_value_heads": 16, "num_key_value_heads": 4}
WIDE_KEYS = {"ssm.time_step_rank": 16, "ssm.inner_size": 256}
ORDERED = ["qwen35", "qwen3next", "qwen35moe", "lfm2", "lfm2moe"]


def wide(name: str) -> Case:
    """A model whose widths fit blocks of 256 numbers."""
    case = BY_NAME[name]
    keys = {f"{case.architecture}.{key}": value for key, value in WIDE_KEYS.items()}
    own = {**WIDE, "intermediate_size": 256}
    if name.startswith("lfm2"):
        own, keys = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}, {}
        keys = {f"{case.architecture}.attention.head_count_kv": [0, 4, 0, 4]}
    return replace(case, overrides=case.overrides | own, metadata=case.metadata | keys)


def mixed(name: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
    """As llama-quantize does: several types, and floats where a converter always writes them."""
    is_float = values.ndim == 1 or "conv" in name or "gate_inp" in name
    if is_float or values.shape[-1] % 256:
        return (values, Type.F32) if is_float else quantised(Type.Q8_0)(name, values)
    kind = "Q4_K" if any(each in name for each in ("ssm_out", "attn_gate", "ssm_alpha")) else "Q8_0"
    rows = like(values.reshape(-1, values.shape[-1]), kind, len(name))
    return rows.reshape(*values.shape[:-1], -1), Type[kind]


@pytest.mark.parametrize("name", ORDERED)
def test_a_file_in_its_own_bits_answers_as_the_same_file_dequantised(
    tmp_path: Path, engines: EngineFactory, name: str
) -> None:
    """To the bit, although panels cannot have another order of inputs; the plan knows the bytes."""
    path = wide(name).write(tmp_path / "m.gguf", Written(encode=mixed))
    results = []
    for weights in ("stored", "dequantised"):
        loaded = load_checkpoint(path, device="cpu", weights=weights)
        planned = planned_storage(read_model_config(path, device="cpu"), weights, is_divided=False)
        if planned is not None:
            assert loaded.low_bits is not None
            assert planned.by_format == loaded.low_bits.by_format
            assert planned.num_bytes == loaded.low_bits.num_bytes
        assert (planned is None) == (weights == "dequantised")
        engine, deployment = engines.over(loaded), deployment_of(loaded)
        prompts = [[5, 9, 77, 3, 50, 8], list(range(2, 60))]
        asked = [request(deployment, each, max_tokens=12, logprobs=3) for each in prompts]
        results.append(answer(engine, *asked))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "reordered", "plain"),
    [("qwen35", "out_proj", "in_proj_qkv"), ("qwen3next", "in_proj_qkvz", "out_proj")],
)
def test_only_columns_and_joined_tensors_are_reordered_at_run_time(
    tmp_path: Path, name: str, reordered: str, plain: str
) -> None:
    """Rows alone are put in order in the panels."""
    path = wide(name).write(tmp_path / "m.gguf", Written(encode=mixed))
    model = load_gguf_model(path, gguf_config(path), torch.float32, keeps_bits=True)
    layer = model.model.layers[0].linear_attn
    assert isinstance(layer.get_submodule(reordered), ReorderedLinear)
    assert isinstance(layer.get_submodule(plain), LowBitLinear)
    kinds = [type(each) for each in model.modules()]
    assert kinds.count(ReorderedLinear) == 3


def with_a_prediction_head(case: Case) -> Written:
    """A file whose last block predicts a second token, as newer converters write it."""
    a, width = case.architecture, case.model().config.hidden_size
    matrix = np.ones((width, width), np.float32)
    tensors: dict[str, np.ndarray | None] = {
        "blk.4.attn_q.weight": matrix,
        "blk.4.nextn.eh_proj.weight": np.ones((width, 2 * width), np.float32),
    }
    return Written(
        metadata={f"{a}.block_count": 5, f"{a}.nextn_predict_layers": 1}, tensors=tensors
    )


def test_heads_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """They are neither loaded nor counted, and the model is that without them."""
    path = QWEN.write(tmp_path / "m.gguf", with_a_prediction_head(QWEN))
    model = QWEN.model()
    assert same_weights(load_gguf_model(path, gguf_config(path), torch.float32), model)
    outline = read_model_config(path, device="cpu")
    assert outline.num_parameters() == sum(each.numel() for each in model.parameters())


def test_layers_may_be_listed_one_by_one(tmp_path: Path) -> None:
    """In place of a period."""
    stated = {"qwen35.attention.recurrent_layers": [True] * 3 + [False]}
    path = QWEN.write(
        tmp_path / "m.gguf", Written(metadata=stated | {"qwen35.full_attention_interval": None})
    )
    assert same_weights(load_gguf_model(path, gguf_config(path), torch.float32), QWEN.model())


def test_the_exp_of_a_logarithm_is_the_number_of_the_file() -> None:
    """For every number that float32's exp gives; zero, and numbers between, get the nearest."""
    logs_H = torch.linspace(-80, 80, 40_001)
    rates_H = -torch.cat([logs_H, logs_H / 1e3]).exp()
    assert torch.equal(-logs_of_rates(rates_H).exp(), rates_H)
    between_H = -torch.linspace(1e-6, 1e6, 10_001)
    torch.testing.assert_close(-logs_of_rates(between_H).exp(), between_H, rtol=2e-6, atol=0)
    assert logs_of_rates(torch.tensor([-0.0])).exp() == 0


LFM = BY_NAME["lfm2moe"]
REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "another hybrid": (
        QWEN,
        {"general.architecture": "granitehybrid"},
        "granitehybrid is not read from GGUF, because its layers keep states of another kind; read",
    ),
    "mamba": (QWEN, {"general.architecture": "mamba"}, "mamba is not .*states of another kind"),
    "heads": (QWEN, {"qwen35.ssm.time_step_rank": 5}, "time_step_rank must be a multiple of 2, go"),
    "inner": (QWEN, {"qwen35.ssm.inner_size": 66}, "inner_size must be a multiple of 4, got 66"),
    "no taps": (QWEN, {"qwen35.ssm.conv_kernel": 1}, "conv_kernel must be an integer >= 2, got '1"),
    "layers": (
        QWEN,
        {"qwen35.attention.recurrent_layers": [True]},
        "recurrent_layers must say it for each of 4 layers",
    ),
    "only predictions": (
        QWEN,
        {"qwen35.nextn_predict_layers": 4},
        "nextn_predict_layers must be < 4, got 4",
    ),
    "softmax": (
        LFM,
        {"lfm2moe.expert_gating_func": 1},
        r"expert_gating_func must be 2 \(sigmoid\), got 1",
    ),
    "key heads": (
        LFM,
        {"lfm2moe.attention.head_count_kv": [0, 2, 0]},
        "head_count_kv must have 4 entries, got 3",
    ),
    "other key heads": (
        LFM,
        {"lfm2moe.attention.head_count_kv": [0, 2, 0, 1]},
        "head_count_kv differs from layer to layer",
    ),
}


@pytest.mark.parametrize(("case", "metadata", "sentence"), REFUSED.values(), ids=REFUSED)
def test_metadata_that_cannot_be_served_are_one_sentence(
    tmp_path: Path, case: Case, metadata: dict[str, Any], sentence: str
) -> None:
    """The sentence names the file and the key."""
    path = case.write(tmp_path / "odd.gguf", Written(metadata=metadata))
    with pytest.raises(ModelError, match=rf"odd\.gguf.*{sentence}"):
        read_model_config(path, device="cpu")


def test_a_growing_state_is_refused(tmp_path: Path) -> None:
    """The converter writes -exp(A_log), so no number is above zero."""
    tensors: dict[str, np.ndarray | None] = {"blk.1.ssm_a": np.array([-1, 0.5, -1, -1], np.float32)}
    path = QWEN.write(tmp_path / "m.gguf", Written(tensors=tensors))
    with pytest.raises(
        ModelError, match=r"blk\.1\.ssm_a must have finite numbers of at most 0, got 0\.5"
    ):
        load_gguf_model(path, gguf_config(path), torch.float32)


def test_inspect_and_config_check_know_the_states_of_a_file(tmp_path: Path) -> None:
    """As of the same model in safetensors: a slot is 3 layers of states."""
    path = QWEN.write(tmp_path / "m.gguf")
    told = run_here("inspect", str(path), "--device", "cpu")
    assert told.returncode == 0, told.stderr
    slot = 3 * (3 * 128 + 4 * 16 * 16) * 4
    assert f"{slot / 1024:.1f} KiB" in told.stdout
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {path}\nkv_cache_tokens: 2048\ndevice: cpu\n")
    checked = run_here("config", "check", str(file))
    assert checked.returncode == 0, checked.stderr
    assert f"{slot / 1024:.1f} KiB" in checked.stdout
