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
from ropewalk.model_runtime.loading.model_config import read_model_config, read_outline
from tests.quantised_cases import CASES, case
from tests.quantised_files import Written, change_config

ACCEPTED = "must be one of awq, compressed-tensors, fp8, gptq, mxfp4, got"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def refusal(folder: Path) -> str:
    """The sentence of a load, which `config check` says, too."""
    with pytest.raises(ModelError) as caught:
        load_checkpoint(folder, device="cpu")
    sentence = str(caught.value)
    assert "\n" not in sentence
    with pytest.raises(ModelError) as planned:
        read_outline(folder, device="cpu").num_weight_bytes()
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
        ({}, f"quant_method {ACCEPTED} None"),
        ({"quant_method": "own"}, f"quant_method {ACCEPTED} 'own'"),
        ({"quant_method": ["x"]}, f"quant_method {ACCEPTED} ['x']"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be one of e4m3, got 'e5m2'"),
        (
            {"quant_method": "fp8", "expert_dtype": "fp4"},
            "expert_dtype must be one of fp8, got 'fp4'",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two whole numbers above 0, got [128]",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits must be one of 2, 4, 8, got 3"),
        ({"quant_method": "gptq", "bits": True}, "bits must be one of 2, 4, 8, got True"),
        ({"quant_method": "gptq"}, "bits must be one of 2, 4, 8, got None"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            "group_size must be a whole number above 0, or -1, got 0",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'",
        ),
        ({"quant_method": "awq", "bits": 8}, "bits must be one of 4, got 8"),
        ({"quant_method": "awq", "version": "GEMV"}, "version must be gemm, got 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point must be one of True, got False"),
        ({"quant_method": "mxfp4"}, "quant_method must be mxfp4 only for model_type gpt_oss"),
        (
            compressed(format="nvfp4-pack-quantized"),
            "format must be one of pack-quantized, int-quantized, naive-quantized, float-quantized,"
            " got 'nvfp4-pack-quantized'",
        ),
        (
            compressed(group={"format": "marlin-24"}),
            "config_groups.group_0.format must be one of pack-quantized",
        ),
        (
            compressed(weights={"num_bits": 3}),
            "config_groups.group_0.weights.num_bits must be one of 4, 8, got 3",
        ),
        (compressed(weights={"type": "float"}), "weights.type must be one of int, got 'float'"),
        (
            compressed(weights={"strategy": "tensor_group"}),
            "strategy must be one of tensor, channel, group, block, got 'tensor_group'",
        ),
        (compressed(group={"targets": None}), "group_0.targets must be a list of names, got None"),
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
            compressed(transform_config={"R1": {}}),
            "transform_config must be absent, got {'R1': {}}",
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


def test_a_refused_format_ends_a_load_and_a_check(fp8: Written) -> None:
    """Both read the same config."""
    change_config(fp8.folder, quantization_config={"quant_method": "bitsandbytes"})
    assert "the package bitsandbytes, which is not used here" in refusal(fp8.folder)


def test_a_missing_scale_is_named_with_its_file(fp8: Written) -> None:
    """Values without a scale mean nothing."""
    fp8.store(**{f"{Q_PROJ}.weight_scale_inv": None})
    file = fp8.folder / "model.safetensors"
    expected = f"{file}: {Q_PROJ}.weight needs {Q_PROJ}.weight_scale_inv, which is absent"
    assert refusal(fp8.folder) == expected


def test_a_scale_of_another_shape_is_named(fp8: Written) -> None:
    """The blocks of the config give the shape."""
    fp8.store(**{f"{Q_PROJ}.weight_scale_inv": torch.ones(2, 1)})
    assert refusal(fp8.folder).endswith(
        f"tensor {Q_PROJ}.weight_scale_inv must have shape [1, 1] in fp8 in blocks of 128 x 128, "
        "got [2, 1]"
    )


def test_a_scale_without_its_weight_is_named(fp8: Written) -> None:
    """A scale that nothing uses may mean a format that is not read."""
    fp8.store(**{f"{Q_PROJ}.weight": torch.ones(128, 128, dtype=torch.bfloat16)})
    assert refusal(fp8.folder).endswith(
        f"tensor {Q_PROJ}.weight_scale_inv of type BF16 has no meaning in quantization fp8 in "
        "blocks of 128 x 128"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("weight_global_scale", torch.ones(1), "F32"),
        ("weight", torch.ones(128, 128).to(torch.float8_e5m2), "F8_E5M2"),
        ("bytes", torch.ones(4, dtype=torch.uint8), "U8"),
        ("weight_zero_point", torch.ones(1, dtype=torch.int8), "I8"),
        ("bias_scale", torch.ones(1), "F32"),
    ],
)
def test_a_tensor_that_no_rule_knows_is_named(
    fp8: Written, name: str, tensor: torch.Tensor, kind: str
) -> None:
    """Its name or its number type says that it belongs to a quantised weight."""
    fp8.store(**{f"{Q_PROJ}.bias": torch.ones(128), f"{Q_PROJ}.{name}": tensor})
    assert f"tensor {Q_PROJ}.{name} of type {kind} has no meaning" in refusal(fp8.folder)


def test_a_scale_of_activations_needs_a_scheme_that_has_them(tmp_path: Path) -> None:
    """W4A16 quantises weights only."""
    written = case("w4a16").write(tmp_path)
    written.store(**{f"{Q_PROJ}.input_scale": torch.ones(1)})
    assert f"tensor {Q_PROJ}.input_scale of type F32 has no meaning" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["fp8-blocks", "w4a16", "gptq"])
def test_quantised_tensors_without_a_config_are_refused(name: str, tmp_path: Path) -> None:
    """Some tools describe them in another file; transformers would read FP8 without its scales."""
    case(name).write(tmp_path)
    change_config(tmp_path, quantization_config=None)
    assert ", but config.json has no quantization_config" in refusal(tmp_path)


def test_a_config_without_quantised_tensors_is_refused(fp8: Written) -> None:
    """It may have been left there by a conversion to another number type."""
    for name in list(fp8.tensors):
        if name.endswith("_scale_inv"):
            fp8.tensors[name.removesuffix("_scale_inv")] = torch.ones(1, 1)
            del fp8.tensors[name]
    fp8.store()
    assert "no tensor is stored in fp8 in blocks of 128 x 128" in refusal(fp8.folder)


@pytest.mark.parametrize(
    ("name", "part", "tensor", "expected"),
    [
        ("gptq", "qzeros", None, "qweight needs {}.qzeros, which is absent"),
        ("gptq", "scales", torch.ones(2, 128), "scales must have shape [1, 128] in int4 in groups"),
        ("gptq", "qzeros", torch.ones(1, 9, dtype=torch.int32), "must have shape [1, 16]"),
        ("gptq", "g_idx", torch.ones(9, dtype=torch.int32), "g_idx must have shape [128]"),
        ("gptq", "qweight", torch.ones(16, 128), "qweight must have type I32"),
        ("gptq", "qweight", torch.ones(16, dtype=torch.int32), "must have 2 dimensions"),
        ("awq", "scales", torch.ones(1, 128), "scales must have shape [2, 128]"),
        ("w4a16", "weight_shape", None, "weight_packed needs {}.weight_shape, which is absent"),
        ("w4a16", "weight_shape", torch.tensor([128, 96]), "must have shape [128, 12]"),
        ("w4a16", "weight_scale", torch.ones(128, 2), "weight_scale must have shape [128, 1]"),
        ("w4a16-zero-points", "weight_zero_point", None, "needs {}.weight_zero_point"),
        ("w8a8", "weight_scale", torch.ones(1), "weight_scale must have shape [128, 1]"),
        ("mixed", "weight_shape", torch.ones(2), "weight_shape of type F32 has no meaning"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    name: str, part: str, tensor: torch.Tensor | None, expected: str, tmp_path: Path
) -> None:
    """The tensor, what the scheme needs, and what is there."""
    written = case(name).write(tmp_path)
    written.store(**{f"{Q_PROJ}.{part}": tensor})
    sentence = refusal(tmp_path)
    assert sentence.startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert expected.format(Q_PROJ) in sentence


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    """Readers differ in how they round the last group."""
    case("gptq").write(tmp_path)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 48}
    change_config(tmp_path, quantization_config=config)
    assert "columns, which are no whole groups of 48" in refusal(tmp_path)


def test_a_group_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Only the values of the tensor show it."""
    written = case("gptq-ordered").write(tmp_path)
    written.store(**{f"{Q_PROJ}.g_idx": torch.full((128,), 4, dtype=torch.int32)})
    assert refusal(tmp_path).endswith("q_proj.g_idx must have indices of 4 groups, got 4 to 4")


def test_a_module_without_a_target_is_refused(tmp_path: Path) -> None:
    """The groups' targets say how a module is stored."""
    written = case("fp8-dynamic").write(tmp_path)
    config = dict(case("fp8-dynamic").config)
    group = {**config["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]}
    change_config(written.folder, quantization_config={**config, "config_groups": {"g": group}})
    sentence = refusal(tmp_path)
    assert "no target of config_groups is model.layers.0.self_attn." in sentence


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_after_dequantising_is_named(fp8: Written, bad: float) -> None:
    """A scale of NaN or Inf makes a block of them."""
    scale = torch.full((1, 1), bad, dtype=torch.bfloat16)
    fp8.store(**{f"{Q_PROJ}.weight_scale_inv": scale})
    with pytest.raises(ModelError, match=rf"weight {Q_PROJ}\.weight has NaN or Inf"):
        load_checkpoint(fp8.folder, device="cpu")


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_sizes_are_those_of_the_dequantised_checkpoint(each: Any, tmp_path: Path) -> None:
    """Read with transformers and without it: bytes in the served number type, and in the files."""
    written = each.write(tmp_path / "quantised")
    written.dequantised(tmp_path / "plain", torch.float32)
    for dtype in ("float32", "bfloat16"):
        expected = read_model_config(tmp_path / "plain", dtype=dtype, device="cpu")
        for read in (read_outline, read_model_config):
            found = read(written.folder, dtype=dtype, device="cpu")
            assert found.num_weight_bytes() == expected.num_weight_bytes()
            assert str(found.stored) == each.described
            size = (written.folder / "model.safetensors").stat().st_size
            assert found.num_stored_bytes() == size
    assert expected.num_stored_bytes() is None
