"""Weights that stay in the bits of their files on a GPU are the dequantised weights.

The modules are torch's operations, so they run on a CPU here. No other kernel is tried.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch.nn.functional import ScalingType
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.codes import stacked
from ropewalk.model_runtime.formats.codes import unpacked as unpacked_codes
from ropewalk.model_runtime.formats.gguf.gguf_blocks import unpacked
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward
from ropewalk.model_runtime.layers.low_bits import executors, humming, stored
from ropewalk.model_runtime.layers.low_bits.executors import products_text
from ropewalk.model_runtime.layers.low_bits.stored import (
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
)
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config, load_gguf_model
from ropewalk.model_runtime.loading.files.quantised_checkpoint import load_quantised
from ropewalk.model_runtime.loading.low_bits import planned
from ropewalk.model_runtime.loading.low_bits.codes import blocks_as_codes
from ropewalk.model_runtime.loading.low_bits.hold import storage_of
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.expert_files import expert_file
from tests.checkpoints.gguf_cases import CASES as GGUF_CASES
from tests.checkpoints.gguf_files import Written as GgufWritten
from tests.checkpoints.gguf_files import quantised
from tests.checkpoints.quantised_cases import CASES, case
from tests.checkpoints.quantised_files import Case, Written, change_config, files_tensors
from tests.checkpoints.random_blocks import random_rows
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer_fast
from tests.oracles.triton_attention import load_as_on_a_gpu

CPU = torch.device("cpu")


def held(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a quantised folder, with weights that stay in their bits."""
    name = str(dtype).removeprefix("torch.")
    outline = read_model_config(folder, dtype=name, device="cpu")
    assert outline.stored is not None
    model, info = load_quantised(
        folder,
        outline.config,
        outline.stored,
        dtype,
        trust_remote_code=False,
        keeps_bits=True,
        device=CPU,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def weight_of(module: StoredLinear) -> Tensor:
    """The widened weight of a linear, in the order of its inputs."""
    assert module.codes is not None
    found = torch.empty(module.out_features, module.in_features, dtype=module.weight.dtype)
    module.codes.fill(found, 1 << 12)
    return found


def logits(model: Any, num_tokens: int) -> Tensor:
    """The logits of a plain forward of transformers."""
    ids = torch.randint(0, 199, (1, num_tokens), generator=torch.manual_seed(1))
    with torch.inference_mode():
        found: Tensor = model(ids).logits
    return found


def assert_same_model(model: Any, expected: Any, num_tokens: int = 24) -> None:
    """Compare the logits of plain forwards in float32."""
    torch.testing.assert_close(
        logits(model, num_tokens), logits(expected, num_tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_safetensors_stay_in_their_bytes_and_have_the_dequantised_weights(
    each: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights agree to the bit, logits within rounding; the plan knows the bytes beforehand."""
    monkeypatch.setattr(stored, "_AT_ONCE", 1 << 13)  # several pieces of a weight
    written = each.write(tmp_path / "quantised")
    expected = written.dequantised(tmp_path / "plain", torch.float32)
    model = held(written.folder)
    linears = {name: own for name, own in model.named_modules() if isinstance(own, StoredLinear)}
    experts = [own for own in model.modules() if isinstance(own, StoredExperts)]
    assert linears
    for name, module in linears.items():
        assert torch.equal(weight_of(module), expected.get_submodule(name).weight), name
    assert len(experts) == (2 if each.name == "fp8-experts" else 0)
    assert_same_model(model, expected)
    found = storage_of(model)
    stored_bytes = sum(
        tensor.nbytes
        for name, tensor in written.tensors.items()
        if tensor.itemsize < 2 or tensor.dtype == torch.int32 or "scale" in name
    )
    assert sum(found.by_format.values()) < 1.1 * stored_bytes + 4096
    monkeypatch.setattr(planned, "has_cpu_kernels", lambda _: False)
    ahead = planned_storage(
        read_model_config(written.folder, dtype="float32", device="cpu"), "stored", is_divided=False
    )
    assert ahead is not None
    assert ahead.float_bytes == found.float_bytes
    assert ahead.by_format.keys() == found.by_format.keys()
    all_codes = [own.codes for own in linears.values() if own.codes is not None]
    orders = sum(each.order.nbytes for each in all_codes if each.order is not None)
    assert ahead.num_bytes == found.num_bytes - orders


@pytest.mark.parametrize("type_name", BY_TYPE)
def test_blocks_of_gguf_have_the_numbers_of_ggml(type_name: str) -> None:
    """To the bit in float32, by the package gguf, for any bits of a block."""
    kind, (num_rows, num_inputs) = BY_TYPE[type_name], (70, 512)
    rows = random_rows(type_name, num_rows, num_inputs)
    pieces = [(first, unpacked(rows[first : first + 32], type_name)) for first in (0, 32, 64)]
    codes = blocks_as_codes(kind, (num_rows, num_inputs), pieces, CPU)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, Type[type_name]))
    assert torch.equal(codes.widened(torch.float32, 3, 50), expected[3:50])
    ids = torch.tensor([69, 0, 69, 12])
    assert torch.equal(codes.at(ids).widened(torch.float32), expected[ids])
    assert torch.equal(codes.widened(torch.bfloat16), expected.bfloat16())
    # Scales and minima of less than eight bits take a byte each.
    assert codes.num_bytes <= 1.2 * rows.nbytes


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
def test_a_gguf_model_holds_its_embedding_and_a_tied_head_once(
    type_name: str, tmp_path: Path
) -> None:
    """Linears, embedding and head are in the file's bits."""
    found = next(each for each in GGUF_CASES if each.name == "llama")
    path = found.write(tmp_path / "model.gguf", GgufWritten(encode=quantised(Type[type_name])))
    config = gguf_config(path)
    model = load_gguf_model(path, config, torch.float32, keeps_bits=True, device=CPU).eval()
    assert isinstance(model.get_input_embeddings(), StoredEmbedding)
    assert isinstance(model.get_output_embeddings(), StoredLinear)
    assert_same_model(model, load_gguf_model(path, config, torch.float32).eval())


def gpt_oss(folder: Path) -> tuple[Path, Any]:
    """A folder with experts in MXFP4, and the model that transformers unpacks of it."""
    model = tiny_model("gpt_oss", hidden_size=128, intermediate_size=64, vocab_size=256)
    model.save_pretrained(folder / "quantised")
    byte_tokenizer_fast().save_pretrained(folder / "quantised")
    tensors, plain = {}, {}
    for name, tensor in files_tensors(folder / "quantised").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = plain[name] = tensor
            continue
        num_experts, num_inputs, num_outputs = tensor.shape
        shape = num_experts, num_outputs, num_inputs // 32, 16
        blocks = torch.randint(256, shape, dtype=torch.uint8)
        scales = torch.randint(115, 123, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    references = {name: tensor.to for name, tensor in plain.items()}
    written = Written(folder / "quantised", tensors, references)
    written.store()
    change_config(written.folder, quantization_config={"quant_method": "mxfp4"})
    return written.folder, written.dequantised(folder / "plain", torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 24, 100])  # one choice at a time, all, or sorted
def test_experts_in_mxfp4_are_those_of_gpt_oss(
    num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the three ways through the experts gives the logits of the dequantised model."""
    monkeypatch.setattr(stored, "_MOST_MULTIPLIED", 64)
    monkeypatch.setattr(stored, "_OF_EXPERTS_AT_ONCE", 1 << 13)  # several pieces of a weight
    folder, expected = gpt_oss(tmp_path)
    model = held(folder)
    found = [own for own in model.modules() if isinstance(own, StoredExperts)]
    assert len(found) == len(model.model.layers)
    assert_same_model(model, expected.eval(), num_tokens)


@pytest.mark.parametrize("num_rows", [1, 24, 600])
def test_routes_stay_on_the_device(num_rows: int, tmp_path: Path) -> None:
    """No way through the experts reads a number of a tensor: here none has any."""
    model = held(gpt_oss(tmp_path)[0], torch.bfloat16)
    experts = model.model.layers[0].mlp.experts.to("meta")
    experts.matrices = {
        name: tuple(each.each(lambda tensor: tensor.to("meta")) for each in parts)
        for name, parts in experts.matrices.items()
    }
    x_RK = torch.empty(num_rows, 128, dtype=torch.bfloat16, device="meta")
    choice_RC = torch.empty(num_rows, 2, dtype=torch.int64, device="meta")
    assert experts(x_RK, choice_RC, choice_RC.bfloat16()).shape == x_RK.shape


def test_sorted_rows_are_multiplied_by_experts_with_an_order_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ's act-order of each expert; an expert may have no row."""
    monkeypatch.setattr(stored, "_OF_EXPERTS_AT_ONCE", 1 << 13)
    layers = held(case("gptq-ordered").write(tmp_path / "quantised").folder).model.layers
    linears = [getattr(layers[0].self_attn, name) for name in ("k_proj", "v_proj")]
    linears.append(layers[1].self_attn.k_proj)
    codes = stacked([each.codes for each in linears])
    x_SK, expert_S = torch.randn(7, codes.num_inputs), torch.tensor([0, 0, 0, 2, 2, 2, 2])
    found = stored.grouped_product(codes, x_SK, stored.ends_of(expert_S, 3))
    expected = torch.cat([linears[0](x_SK[:3]), linears[2](x_SK[3:])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_of_a_gguf_file_stay_in_their_bits(tmp_path: Path) -> None:
    """Gates and ups may have other types than downs."""
    path = expert_file(
        tmp_path / "model.gguf", ("Q4_K", "Q4_K", "Q6_K"), case="qwen3moe", width=256
    )
    config = gguf_config(path)
    model = load_gguf_model(path, config, torch.float32, keeps_bits=True, device=CPU).eval()
    assert any(isinstance(own, StoredExperts) for own in model.modules())
    assert_same_model(model, load_gguf_model(path, config, torch.float32).eval())


def test_a_model_is_loaded_as_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares it with the widened weights; the banner says how they multiply."""
    load_as_on_a_gpu(monkeypatch)
    folder = case("gptq-ordered").write(tmp_path / "quantised").folder
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    assert checkpoint.low_bits is not None
    assert checkpoint.products.startswith("int4 in groups of 32 widened for each product")
    assert isinstance(vars(checkpoint.model).get("forward"), FlatForward)


def scaled_mm(a_RK: Tensor, b_KN: Tensor, *scaling: Any, output_dtype: torch.dtype) -> Tensor:
    """Torch's product of FP8 in blocks in float64, with the shapes and strides that CUDA wants.

    They are those of ScaledBlas.cpp in torch 2.13. No CPU has this product.
    """
    scale_a, recipe_a, scale_b, recipe_b = scaling
    (num_rows, num_inputs), num_outputs = a_RK.shape, b_KN.shape[1]
    num_groups, num_blocks = num_inputs // 128, -(-num_outputs // 128)
    padded = -(-num_groups // 4) * 4
    assert [recipe_a, recipe_b] == [ScalingType.BlockWise1x128, ScalingType.BlockWise128x128]
    assert a_RK.dtype == b_KN.dtype == torch.float8_e4m3fn
    assert num_rows % 4 == 0
    assert scale_a.shape == (num_rows, num_groups)
    assert scale_b.shape == (padded, num_blocks)
    assert scale_a.stride() in ((1, num_rows), (1, 1))
    assert scale_b.stride() in ((1, padded), (1, 1))
    a = a_RK.double() * scale_a.double().repeat_interleave(128, 1)
    scale_KN = scale_b[:num_groups].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    found: Tensor = a @ (b_KN.double() * scale_KN[:, :num_outputs])
    return found.to(output_dtype)


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-blocks", "fp8-powers-of-two"])
def test_rows_are_rounded_to_fp8(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come near the exact product, and not to it; one scale may belong to 128 inputs."""
    if name != "fp8-dynamic":
        monkeypatch.setattr(executors, "multiplies_blocks", lambda _: True)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    model = held(case(name).write(tmp_path / "quantised").folder)
    layer = model.model.layers[0]
    modules = layer.self_attn.q_proj, layer.mlp.down_proj
    rows = [torch.randn(2, 3, each.in_features) for each in modules]
    for x in rows:
        x[0, 0] *= 1000.0  # of one row, which has scales of its own
    exact = [module(x) for module, x in zip(modules, rows, strict=True)]
    assert executors.round_to_fp8(model)
    for module, x, expected in zip(modules, rows, exact, strict=True):
        distance = (module(x) - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert distance.min() > 1e-4
        assert distance.max() < 0.08


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-compressed-blocks"])
def test_rows_of_blocks_that_a_card_does_not_multiply_stay_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Hopper multiplies blocks of 128 x 128, and no card those of 64 x 128."""
    is_hopper = name == "fp8-compressed-blocks"
    monkeypatch.setattr(executors, "multiplies_blocks", lambda _: is_hopper)
    model = held(case(name).write(tmp_path / "quantised").folder)
    assert not executors.round_to_fp8(model)
    assert not model.model.layers[0].self_attn.q_proj.product_name


@pytest.mark.parametrize("factor", [1.001, 1.5, float("nan"), None])
def test_a_librarys_product_is_used_if_its_figures_are_those_of_the_widened_weight(
    factor: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong product, NaN, and one that raises leave the product of the widened weight."""
    model = held(case("awq").write(tmp_path / "quantised").folder)
    monkeypatch.setattr(executors, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(humming, "is_there", lambda: True)

    def product(codes: Any, _: torch.dtype) -> Any:
        if factor is None:
            raise RuntimeError("no compiler")
        return lambda x, bias: stored.widened_product(codes, x, bias) * factor

    monkeypatch.setattr(humming, "product", product)
    executors.choose_products(model)
    text = products_text(model)
    module = model.model.layers[0].self_attn.q_proj
    is_taken = factor == 1.001
    assert (module.codes is None) == is_taken
    assert ("by humming-kernels" in text) == is_taken
    assert ("widened" in text) == (not is_taken)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_librarys_product_of_experts_takes_the_codes_of_a_layer(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts are right, or the widened weights serve; it multiplies any number of rows."""
    is_right = factor == 1.0
    folder, expected = gpt_oss(tmp_path)
    model = held(folder)
    monkeypatch.setattr(executors, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(humming, "is_there", lambda: True)
    expected_bytes = storage_of(model).expert_bytes
    rows = []

    def product(codes: Any, _: torch.dtype) -> Any:
        is_down = codes.num_inputs == 64  # an expert has 64 numbers between its products

        def multiply(x_SK: Tensor, end_E: Tensor) -> Tensor:
            rows.append(len(x_SK))
            return stored.grouped_product(codes, x_SK, end_E) * (factor if is_down else 1.0)

        return multiply

    monkeypatch.setattr(humming, "product_of_experts", product)
    executors.choose_products(model)
    experts = model.model.layers[0].mlp.experts
    assert experts.matrices["down_proj"][0].lower.is_meta == is_right
    assert experts.product_name == (humming.NAME if is_right else "")
    assert storage_of(model).expert_bytes == expected_bytes
    assert f"experts in mxfp4 {'by humming' if is_right else 'widened'}" in products_text(model)
    rows.clear()
    for num_tokens in (1, 24):
        assert_same_model(model, expected.eval(), num_tokens)
    assert bool(rows) == is_right


def test_the_librarys_tensors_hold_the_codes_of_mxfp4(tmp_path: Path) -> None:
    """Shapes and words as humming 0.1.20 has them; GGUF's codes of MXFP4 are others."""
    experts = held(gpt_oss(tmp_path)[0]).model.layers[0].mlp.experts
    (codes,) = experts.matrices["gate_up_proj"]
    assert humming.could_serve(codes)
    config, tensors = humming._stored(codes, torch.bfloat16)
    assert config == {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}
    shape = experts.num_experts, codes.num_outputs
    assert tensors["weight"].shape == (*shape, codes.num_inputs // 8)
    assert tensors["weight_scale"].shape == (*shape, codes.num_inputs // 32)
    assert tensors["weight_scale"].dtype == torch.float8_e8m0fnu
    rows = random_rows("MXFP4", 64, 128)
    kind = BY_TYPE["MXFP4"]
    other = blocks_as_codes(kind, (64, 128), [(0, unpacked(rows, "MXFP4"))], CPU)
    assert not humming.could_serve(other)


def test_the_librarys_tensors_hold_the_codes_of_the_file(tmp_path: Path) -> None:
    """Shapes as humming 0.1.20 documents them; nothing of it runs here."""
    model = held(case("awq").write(tmp_path / "quantised").folder)
    codes = model.model.layers[0].mlp.down_proj.codes
    assert humming.could_serve(codes)
    config, tensors = humming._stored(codes, torch.bfloat16)
    num_groups = codes.num_inputs // 64
    assert config == {"dtype": "uint4", "group_size": 64, "has_zero_point": True}
    assert tensors["weight"].shape == (codes.num_outputs, codes.num_inputs // 8)
    assert tensors["weight_scale"].shape == (codes.num_outputs, num_groups)
    assert tensors["zero_point"].shape == (codes.num_outputs // 8, num_groups)
    zero_GN = unpacked_codes(tensors["zero_point"].t().contiguous().view(torch.uint8), 4)
    assert torch.equal(zero_GN.t(), codes.zero.numbers)


@pytest.mark.parametrize("name", ["awq", "fp8-blocks", "fp8-experts", "w4a16"])
def test_a_config_alone_promises_about_the_bytes_of_a_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a hub id whose weights are not here."""
    monkeypatch.setattr(planned, "has_cpu_kernels", lambda _: False)
    folder = case(name).write(tmp_path / "quantised").folder
    sizes = []
    for has_weights in (True, False):
        options: Mapping[str, Any] = {"dtype": "float32", "has_weights": has_weights}
        found = planned_storage(
            read_model_config(folder, device="cpu", **options), "stored", is_divided=False
        )
        assert found is not None
        sizes.append(found.num_bytes)
    assert abs(sizes[1] / sizes[0] - 1) < 0.05


def test_weights_in_few_bits_are_not_divided_among_gpus(tmp_path: Path) -> None:
    """`weights` is refused by name; dequantised weights and float checkpoints are divided."""
    quantised = case("awq").write(tmp_path / "quantised").folder
    tiny_model("llama").save_pretrained(tmp_path / "floats")
    byte_tokenizer_fast().save_pretrained(tmp_path / "floats")
    for folder, weights in ((quantised, "dequantised"), (tmp_path / "floats", "stored")):
        outline = read_model_config(folder, device=torch.device("cuda"))
        assert planned_storage(outline, weights, is_divided=True) is None
    outline = read_model_config(quantised, device=torch.device("cuda"))
    with pytest.raises(ModelError, match="weights: stored is not divided among GPUs; set weights"):
        planned_storage(outline, "stored", is_divided=True)
