"""Unread parts of a quantised checkpoint are refused by the field or the tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.quantization_config import QuantizationMethod

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.quantised_scheme import FORMATS
from ropewalk.model_runtime.formats.read_scheme import _READERS, read_scheme
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.quantised_cases import CASES, case
from tests.checkpoints.quantised_files import Written, change_config

ACCEPTED = "must be one of awq, compressed-tensors, fp8, gptq, mxfp4, got"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def refusal(folder: Path) -> str:
    """The sentence of a load, which `config check` says, too."""
    with pytest.raises(ModelError) as caught:
        load_checkpoint(folder, device="cpu")
    sentence = str(caught.value)
    assert "\n" not in sentence
    with pytest.raises(ModelError) as planned:
        read_model_config(folder, device="cpu").num_weight_bytes()
    assert str(planned.value) == sentence
    return sentence


@pytest.fixture
def fp8(tmp_path: Path) -> Written:
    """A checkpoint in FP8 with blocks, to be broken."""
    return case("fp8-blocks").write(tmp_path)


@pytest.mark.parametrize(
    ("method", "package"),
    [
        (each.method, each.package)
        for each in FORMATS
        if each.package and each.method != "compressed-tensors"  # read in part
    ],
)
def test_a_format_that_is_not_read_names_its_package(method: str, package: str) -> None:
    """A reader learns what to dequantise the checkpoint with."""
    expected = f"^/m: quantization_config.quant_method {ACCEPTED} '{method}'; .*package {package},"
    with pytest.raises(ModelError, match=expected):
        read_scheme({"quant_method": method, "bits": 4}, "llama", "/m")


def test_every_format_of_transformers_is_read_or_named() -> None:
    """A new version of transformers may bring more; then the table grows."""
    known = {each.value for each in QuantizationMethod} - {"gguf"}
    assert known <= {each.method for each in FORMATS}
    assert {each.method for each in FORMATS if not each.package} == set(_READERS)


INT4 = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}


def compressed(**changes: Any) -> dict[str, Any]:
    """A config of compressed-tensors with changes at the top, of the group, or of its weights."""
    weights = {**INT4, **changes.pop("weights", {})}
    group = {"targets": ["Linear"], "weights": weights, **changes.pop("group", {})}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        **changes,
    }


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ([], "quantization_config must be an object, got []"),
        ({"quant_method": "own"}, f"quant_method {ACCEPTED} 'own'"),
        ({"quant_method": ["x"]}, f"quant_method {ACCEPTED} ['x']"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be one of e4m3, got 'e5m2'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two whole numbers above 0, got [128]",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits must be one of 2, 4, 8, got 3"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            "group_size must be a whole number above 0, or -1, got 0",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'",
        ),
        ({"quant_method": "awq", "version": "GEMV"}, "version must be gemm, got 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point must be one of True, got False"),
        ({"quant_method": "mxfp4"}, "quant_method must be mxfp4 only for model_type gpt_oss"),
        (
            compressed(format="nvfp4-pack-quantized"),
            "format must be one of pack-quantized, int-quantized, naive-quantized, float-quantized,"
            " got 'nvfp4-pack-quantized'",
        ),
        (
            compressed(weights={"num_bits": 3}),
            "config_groups.group_0.weights.num_bits must be one of 4, 8, got 3",
        ),
        (
            compressed(weights={"strategy": "tensor_group"}),
            "strategy must be one of tensor, channel, group, block, got 'tensor_group'",
        ),
        (
            compressed(group={"targets": ["re:*bad"]}),
            "group_0.targets must be a list of names, and of patterns after re: (nothing to repeat "
            "at position 0), got 're:*bad'",
        ),
        (compressed(group={"weights": None}), "group_0.weights must be an object"),
        (compressed(config_groups={}), "config_groups must be an object with a group, got {}"),
        (
            compressed(quantization_status="calibration"),
            "quantization_status must be one of compressed, frozen, got 'calibration'",
        ),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format must be one of dense, got 'sparse-24-bitmask'",
        ),
        (
            compressed(group={"output_activations": {"num_bits": 8}}),
            "group_0.output_activations must be absent, got {'num_bits': 8}",
        ),
    ],
)
def test_a_field_that_is_not_read_is_named_with_what_is(config: Any, sentence: str) -> None:
    """The field, what it accepts, and its value."""
    with pytest.raises(ModelError) as caught:
        read_scheme(config, "llama", "/m")
    assert str(caught.value).startswith("/m: quantization_config")
    assert sentence in str(caught.value)


NO_TARGET = compressed(group={"targets": ["re:.*mlp.*"]})
NO_CONFIG: dict[str, Any] = {"quantization_config": None}
BLOCKS = "fp8 in blocks of 128 x 128"
# The case, tensors of one projection that change, changes of the config, and the sentence.
UNFIT: list[tuple[str, dict[str, torch.Tensor | None], dict[str, Any], str]] = [
    (
        "fp8-blocks",
        {},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "the package bitsandbytes, which is not used here",
    ),
    ("fp8-blocks", {"weight_scale_inv": None}, {}, "weight needs {}.weight_scale_inv, which is"),
    (
        "fp8-blocks",
        {"weight_scale_inv": torch.ones(2, 1)},
        {},
        f"tensor {{}}.weight_scale_inv must have shape [1, 1] in {BLOCKS}, got [2, 1]",
    ),
    (
        "fp8-blocks",
        {"weight": torch.ones(128, 128, dtype=torch.bfloat16)},
        {},
        f"{{}}.weight_scale_inv of type BF16 has no meaning in quantization {BLOCKS}",
    ),
    (
        "fp8-blocks",
        {"weight": torch.ones(128, 128).to(torch.float8_e5m2)},
        {},
        "tensor {}.weight of type F8_E5M2 has no meaning",
    ),
    ("fp8-blocks", {"bytes": torch.ones(4, dtype=torch.uint8)}, {}, "type U8 has no meaning"),
    ("fp8-blocks", {"bias_scale": torch.ones(1)}, {}, "bias_scale of type F32 has no meaning"),
    ("w4a16", {"input_scale": torch.ones(1)}, {}, "{}.input_scale of type F32 has no meaning"),
    ("fp8-blocks", {}, NO_CONFIG, ", but config.json has no quantization_config"),
    ("gptq", {}, NO_CONFIG, ", but config.json has no quantization_config"),
    ("gptq", {"qzeros": None}, {}, "qweight needs {}.qzeros, which is absent"),
    ("gptq", {"scales": torch.ones(2, 128)}, {}, "must have shape [1, 128] in int4 in groups"),
    ("gptq", {"g_idx": torch.ones(9, dtype=torch.int32)}, {}, "g_idx must have shape [128]"),
    ("gptq", {"qweight": torch.ones(16, 128)}, {}, "qweight must have type I32"),
    ("gptq", {"qweight": torch.ones(16, dtype=torch.int32)}, {}, "must have 2 dimensions"),
    (
        "gptq",
        {},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 48}},
        "columns, which are no whole groups of 48",
    ),
    (
        "gptq-ordered",
        {"g_idx": torch.full((128,), 4, dtype=torch.int32)},
        {},
        "{}.g_idx must have indices of 4 groups, got 4 to 4",
    ),
    ("awq", {"scales": torch.ones(1, 128)}, {}, "scales must have shape [2, 128]"),
    ("w4a16", {"weight_shape": torch.tensor([128, 96])}, {}, "must have shape [128, 12]"),
    ("w4a16-zero-points", {"weight_zero_point": None}, {}, "needs {}.weight_zero_point"),
    ("w8a8", {"weight_scale": torch.ones(1)}, {}, "weight_scale must have shape [128, 1]"),
    ("mixed", {"weight_shape": torch.ones(2)}, {}, "weight_shape of type F32 has no meaning"),
    ("w4a16", {}, {"quantization_config": NO_TARGET}, "no target of config_groups is model.layers"),
]


@pytest.mark.parametrize(
    ("name", "tensors", "config", "sentence"), UNFIT, ids=[each[0] + each[3][:30] for each in UNFIT]
)
def test_what_does_not_fit_is_one_sentence_of_a_load_and_of_a_check(
    name: str,
    tensors: dict[str, torch.Tensor | None],
    config: dict[str, Any],
    sentence: str,
    tmp_path: Path,
) -> None:
    """The tensor or the field, what the scheme needs, and what is there."""
    written = case(name).write(tmp_path)
    if tensors:
        bias = {f"{Q_PROJ}.bias": torch.ones(128)} if "bias_scale" in tensors else {}
        changes = {f"{Q_PROJ}.{part}": each for part, each in tensors.items()}
        written.store(**bias, **changes)
    if config:
        change_config(tmp_path, **config)
    said = refusal(tmp_path)
    assert said.startswith(str(tmp_path))
    assert sentence.format(Q_PROJ) in said


def test_a_config_without_quantised_tensors_is_refused(fp8: Written) -> None:
    """It may have been left there by a conversion to another number type."""
    for name in list(fp8.tensors):
        if name.endswith("_scale_inv"):
            fp8.tensors[name.removesuffix("_scale_inv")] = torch.ones(1, 1)
            del fp8.tensors[name]
    fp8.store()
    assert "no tensor is stored in fp8 in blocks of 128 x 128" in refusal(fp8.folder)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_after_dequantising_is_named(fp8: Written, bad: float) -> None:
    """A scale of NaN or Inf makes a block of them."""
    scale = torch.full((1, 1), bad, dtype=torch.bfloat16)
    fp8.store(**{f"{Q_PROJ}.weight_scale_inv": scale})
    with pytest.raises(ModelError, match=rf"weight {Q_PROJ}\.weight has NaN or Inf"):
        load_checkpoint(fp8.folder, device="cpu")


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_sizes_are_those_of_the_dequantised_checkpoint(each: Any, tmp_path: Path) -> None:
    """Bytes in the served number type, and in the files."""
    written = each.write(tmp_path / "quantised")
    written.dequantised(tmp_path / "plain", torch.float32)
    for dtype in ("float32", "bfloat16"):
        expected = read_model_config(tmp_path / "plain", dtype=dtype, device="cpu")
        found = read_model_config(written.folder, dtype=dtype, device="cpu")
        assert found.num_weight_bytes() == expected.num_weight_bytes()
        assert str(found.stored) == each.described
        size = (written.folder / "model.safetensors").stat().st_size
        assert found.num_stored_bytes() == size
    assert expected.num_stored_bytes() is None
