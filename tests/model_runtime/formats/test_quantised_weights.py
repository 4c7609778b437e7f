"""Quantised checkpoints are loaded with the weights that a reference reads in the same files."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ropewalk.model_runtime.formats import dequantise
from ropewalk.model_runtime.formats.dequantise import open_weights, unpack
from ropewalk.model_runtime.formats.quantised_inventory import read_inventory
from ropewalk.model_runtime.formats.read_scheme import read_scheme
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.files.quantised_checkpoint import load_quantised
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.quantised_cases import CASES, case
from tests.checkpoints.quantised_files import (
    Case,
    Written,
    change_config,
    compressed,
    files_tensors,
    packed_words,
)
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.tokens import byte_tokenizer_fast

DTYPES = (torch.float32, torch.bfloat16)
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The model of transformers as it is before it is patched."""
    name = str(dtype).removeprefix("torch.")
    outline = read_model_config(folder, dtype=name, device="cpu")
    assert outline.stored is not None
    model, info = load_quantised(
        folder, outline.config, outline.stored, dtype, trust_remote_code=False
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def assert_same_answer(
    checkpoint: Checkpoint, untouched: PreTrainedModel, engines: EngineFactory
) -> None:
    """Compare greedy tokens with transformers' generate."""
    prompt = list(range(40, 52))
    engine, deployment = engines.over(checkpoint), deployment_of(checkpoint)
    result = answer(engine, request(deployment, prompt, max_tokens=16, ignore_eos=True))[0]
    generated = untouched.generate(
        torch.tensor([prompt]),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=1,
        eos_token_id=None,
    )
    assert [*prompt, *result.token_ids] == generated[0].tolist()


def found_weight(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """The one weight of a file, in float32."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(dict(tensors), path)
        inventory = read_inventory([path], read_scheme(config, "llama", path))
        with open_weights([path], inventory, torch.float32) as weights:
            ((_, weight),) = weights.items()
            found: torch.Tensor = weight[...]
            return found


@pytest.mark.parametrize(
    ("each", "dtype"),
    [
        *((each, torch.float32) for each in CASES),
        *((case(name), torch.bfloat16) for name in ("fp8-blocks", "w4a16", "gptq-ordered", "awq")),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_weights_are_those_of_the_reference_to_the_bit(
    each: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The files are of one format each; other tensors are as they would be without it."""
    written = each.write(tmp_path / "quantised")
    expected = written.dequantised(tmp_path / "plain", dtype).state_dict()
    found = loaded(written.folder, dtype).state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "name",
    [
        *("fp8-blocks", "fp8-experts", "w4a16", "w8a8", "mixed", "gptq-ordered", "awq"),
    ],
)
def test_greedy_tokens_are_those_of_the_dequantised_model(
    name: str, engines: EngineFactory, tmp_path: Path
) -> None:
    """The reference is transformers' generate on the unquantised checkpoint."""
    written = case(name).write(tmp_path / "quantised")
    untouched = written.dequantised(tmp_path / "plain", torch.float32)
    checkpoint = load_checkpoint(written.folder, dtype="float32", device="cpu")
    assert_same_answer(checkpoint, untouched, engines)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpt_oss_in_mxfp4_is_what_transformers_unpacks(
    dtype: torch.dtype, engines: EngineFactory, tmp_path: Path
) -> None:
    """All 16 values and exponents down to 2^-12 occur in the blocks."""
    model = tiny_model("gpt_oss", hidden_size=128, intermediate_size=64, vocab_size=256)
    model.save_pretrained(tmp_path / "quantised")
    byte_tokenizer_fast().save_pretrained(tmp_path / "quantised")
    tensors, plain = {}, {}
    for name, tensor in files_tensors(tmp_path / "quantised").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = plain[name] = tensor
            continue
        num_experts, num_inputs, num_outputs = tensor.shape
        blocks = torch.randint(
            256, (num_experts, num_outputs, num_inputs // 32, 16), dtype=torch.uint8
        )
        scales = torch.randint(115, 123, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    references = {name: tensor.to for name, tensor in plain.items()}
    written = Written(tmp_path / "quantised", tensors, references)
    written.store()
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    change_config(written.folder, quantization_config=mxfp4)
    expected = written.dequantised(tmp_path / "plain", dtype)
    found = loaded(written.folder, dtype).state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name
    if dtype == torch.float32:
        checkpoint = load_checkpoint(written.folder, dtype="float32", device="cpu")
        assert_same_answer(checkpoint, expected, engines)
        assert checkpoint.outline is not None
        assert str(checkpoint.outline.stored) == "mxfp4"
        assert checkpoint.report.bitwise
        assert checkpoint.low_bits is not None
        planned = planned_storage(read_model_config(written.folder), "stored", is_divided=False)
        assert planned is not None
        assert planned.by_format == checkpoint.low_bits.by_format
        assert planned.num_bytes == checkpoint.low_bits.num_bytes
        floats = load_checkpoint(written.folder, device="cpu", weights="dequantised")
        assert floats.low_bits is None
        asked = [
            request(deployment_of(each), [5, 9, 77, 3], max_tokens=8, logprobs=3)
            for each in (checkpoint, floats)
        ]
        engine, other = engines.over(checkpoint), engines.over(floats)
        assert answer(engine, asked[0]) == answer(other, asked[1])


def test_blocks_at_the_edge_are_cut() -> None:
    """A weight of 200 x 160 has two rows and columns of blocks, the last ones not whole."""
    values = torch.randn(200, 160).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2)
    weight = found_weight({"m.weight": values, "m.weight_scale_inv": scale}, FP8_BLOCKS)
    wide = scale.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(weight, (values.double() * wide).float())


def test_experts_in_one_tensor_have_scales_each() -> None:
    """transformers writes the experts of a layer as one tensor [E, O, I]."""
    values, scale = torch.randn(3, 256, 128).to(torch.float8_e4m3fn), torch.rand(3, 2, 1)
    tensors = {"m.experts.gate_up_proj": values, "m.experts.gate_up_proj_scale_inv": scale}
    wide = scale.repeat_interleave(128, 1).expand(3, 256, 128)
    assert torch.equal(found_weight(tensors, FP8_BLOCKS), values.float() * wide)


def test_a_weight_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces begin at the rows of a block, and at whole words."""
    monkeypatch.setattr(dequantise, "_MOST_ELEMENTS", 2000)
    for name in ("fp8-blocks", "fp8-compressed-blocks", "w4a16-zero-points", "gptq-ordered", "awq"):
        encode = case(name).encoder("q_proj")
        assert encode is not None
        tensors, reference = encode(torch.randn(256, 128))
        stored = {f"m.{part}": each for part, each in tensors.items()}
        found = found_weight(stored, case(name).config)
        assert torch.equal(found, reference(torch.float32)), name


@pytest.mark.parametrize("shape", [(512, 14336), (256, 6144)])
def test_a_wide_packed_weight_has_the_scales_of_its_blocks(shape: tuple[int, int]) -> None:
    """Pieces of a published width begin inside a block, unless the grid moves them."""
    weights = {"num_bits": 4, "type": "int", "strategy": "block", "block_structure": [128, 128]}
    for symmetric in (True, False):
        each = {**weights, "symmetric": symmetric}
        # Every block has a scale of its own.
        spread = torch.linspace(0.5, 8.0, shape[0] // 128).repeat_interleave(128)[:, None]
        encode = compressed("pack-quantized", **each)
        tensors, reference = encode(torch.randn(shape) * spread)
        config = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": each}},
        }
        found = found_weight({f"m.{part}": part_of for part, part_of in tensors.items()}, config)
        assert torch.equal(found, reference(torch.float32))


def test_groups_of_compressed_tensors_may_be_ordered() -> None:
    """`weight_g_idx` has each input's group; -1 everywhere means that they are in turn."""
    encode = case("w4a16-zero-points").encoder("q_proj")
    assert encode is not None
    tensors, reference = encode(torch.randn(64, 128))
    stored = {f"m.{part}": each for part, each in tensors.items()}
    config = case("w4a16-zero-points").config
    in_turn = torch.full((128,), -1, dtype=torch.int32)
    expected = reference(torch.float32)
    assert torch.equal(found_weight({**stored, "m.weight_g_idx": in_turn}, config), expected)
    order = torch.arange(128) // 32
    integers = expected / stored["m.weight_scale"].float()[:, order]
    shuffled = order[torch.randperm(128)]
    found = found_weight({**stored, "m.weight_g_idx": shuffled.to(torch.int32)}, config)
    zero = unpack(stored["m.weight_zero_point"].T.contiguous(), 4).T[:64] - 8
    values = integers.round() + zero[:, order] - zero[:, shuffled]
    assert torch.equal(found, values * stored["m.weight_scale"].float()[:, shuffled])


def test_zero_points_of_compressed_tensors_may_be_bytes() -> None:
    """Versions before zero points were packed stored int8 [O, G]."""
    encode = case("w4a16-zero-points").encoder("q_proj")
    assert encode is not None
    tensors, reference = encode(torch.randn(64, 128))
    zero = unpack(tensors["weight_zero_point"].T.contiguous(), 4).T[:64] - 8
    stored = {f"m.{part}": each for part, each in tensors.items()}
    stored["m.weight_zero_point"] = zero.to(torch.int8).contiguous()
    found = found_weight(stored, case("w4a16-zero-points").config)
    assert torch.equal(found, reference(torch.float32))


def test_a_zero_point_of_gptqs_first_format_stays_within_its_bits() -> None:
    """AutoGPTQ stores zero point 0 as the highest value, and adds one within the bits."""
    values = torch.full((8, 8), 5)
    tensors = {
        "m.qweight": packed_words(values, 4).T.contiguous(),
        "m.qzeros": packed_words(torch.full((1, 8), 15), 4),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    assert torch.equal(found_weight(tensors, config), torch.full((8, 8), 5.0))


def test_parameters_named_like_scales_are_plain(tmp_path: Path) -> None:
    """Gemma 4 has one per expert, Zaya one per layer, DeepSeek-V4 one per connection."""
    path = tmp_path / "model.safetensors"
    plain = ("router.per_expert_scale", "model.layers.0.residual_scale", "m.hc_scale")
    tensors = {"m.weight": torch.randn(128, 128).to(torch.float8_e4m3fn)}
    tensors |= {"m.weight_scale_inv": torch.ones(1, 1)}
    save_file({**tensors, **{name: torch.ones(4) for name in plain}}, path)
    inventory = read_inventory([path], read_scheme(FP8_BLOCKS, "llama", path))
    assert {each.name for each in inventory.plain} == set(plain)
    assert [each.name for each in inventory.quantised] == ["m.weight"]


def test_zero_points_of_activations_are_no_weights(tmp_path: Path) -> None:
    """Static asymmetric activations in int8 have one byte each, beside a scale."""
    written = case("w8a8").write(tmp_path / "quantised")
    expected = loaded(written.folder, torch.float32).state_dict()
    modules = [name.removesuffix(".weight") for name in written.references if "_proj" in name]
    zero, scale = torch.ones(1, dtype=torch.int8), torch.ones(1)
    written.store(
        **{f"{module}.input_zero_point": zero.clone() for module in modules},
        **{f"{module}.input_scale": scale.clone() for module in modules},
    )
    found = loaded(written.folder, torch.float32).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_tensors_may_be_in_several_files(tmp_path: Path) -> None:
    """A scale may be in another shard than its values."""
    written = case("fp8-blocks").write(tmp_path / "quantised")
    expected = loaded(written.folder, torch.float32).state_dict()
    names = sorted(written.tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (written.folder / "model.safetensors").unlink()
    for file, within in shards.items():
        save_file({name: written.tensors[name] for name in within}, written.folder / file)
    index = {name: file for file, within in shards.items() for name in within}
    text = json.dumps({"weight_map": index})
    (written.folder / "model.safetensors.index.json").write_text(text)
    found = loaded(written.folder, torch.float32).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
