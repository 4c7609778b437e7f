"""Experts of few bits: the bits of their widened weights, and never held as floats."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import widened
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.layers.experts.lay_out import pack
from ropewalk.model_runtime.layers.experts.low_bit import LowBitExperts
from ropewalk.model_runtime.layers.experts.routing import expert_blocks, rule
from ropewalk.model_runtime.layers.low_bits.modules import LowBitEmbedding, LowBitLinear
from ropewalk.model_runtime.layers.low_bits.rounded import round_activations
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config, load_gguf_model
from ropewalk.model_runtime.loading.low_bits.hold import storage_of
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.low_bits.quantise import quantise_model
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.expert_files import FILES, expert_file
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.doubles.tensor_meter import TensorMeter
from tests.doubles.tokens import byte_tokenizer

DTYPES = (torch.float32, torch.bfloat16)
SIZES = {"num_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "moe_topk": 3}
# 320 outputs of gate and up in turn are five panels.
WIDTHS = {"moe_intermediate_size": 96, "intermediate_size": 160}


def quantised(architecture: str, dtype: torch.dtype, **widths: int) -> tuple[Any, Any]:
    """A model in int8, and the model with its widened weights, in float32."""
    model = in_dtype(tiny_model(architecture, **SIZES, **widths), dtype)
    plain = copy.deepcopy(model).float()
    quantise_model(model, byte_tokenizer())
    for name, module in model.named_modules():
        if isinstance(module, LowBitLinear | LowBitEmbedding):
            plain.get_submodule(name).weight.data.copy_(widened(module.panels, torch.float32))
        if isinstance(module, LowBitExperts):
            own: Any = plain.get_submodule(name)
            for key, matrix in module.matrices.items():
                rows_ENK = torch.stack(
                    [
                        torch.cat([widened(part, torch.float32) for part in parts])
                        for parts in matrix.parts_E
                    ]
                )
                held = rows_ENK.transpose(1, 2) if own.is_transposed else rows_ENK
                getattr(own, key).data.copy_(held)
    return model, plain


def packed_block(model: Any) -> Any:
    """The first block with experts, packed."""
    block, _ = next(expert_blocks(model))
    holder = nn.ModuleList([block])
    rule(holder)
    packed_linear.pack(holder)
    packed_linear.replace_activations(holder)
    pack(holder, next(block.parameters()).dtype)
    return block


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["mixtral", "aria_text", "gpt_oss"])
def test_few_bits_have_the_bits_of_their_widened_weights(
    architecture: str, dtype: torch.dtype
) -> None:
    """Beside each other, transposed, and in turn with biases; experts get 1 to 60 rows.

    Rows in bfloat16 are multiplied in float32, and only the result is rounded.
    """
    model, plain = quantised(architecture, dtype, **WIDTHS)
    few, floats = packed_block(model).experts, packed_block(plain).experts
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, 64, generator=generator).to(dtype)
    choice = torch.rand(60, 8, generator=generator).topk(3).indices
    choice[:, 0] = 5
    weights = torch.rand(60, 3, generator=generator)
    for rows in (slice(0, 60), slice(0, 1), slice(7, 12)):
        found = few(x[rows], choice[rows], weights[rows])
        expected = floats(x[rows].float(), choice[rows], weights[rows])
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_an_unpacked_layer_of_few_bits_answers_as_transformers(architecture: str) -> None:
    """The self-check compares with this forward, which widens one expert at a time."""
    model, plain = quantised(architecture, torch.float32, **WIDTHS)
    ids = torch.randint(0, 199, (1, 20), generator=torch.manual_seed(1))
    with torch.inference_mode():
        found, expected = model(ids).logits, plain(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_mixture_in_int8_keeps_its_bits_in_a_batch(engines: EngineFactory) -> None:
    """Its storage counts the experts."""
    model, _ = quantised("qwen3_moe", torch.float32, **WIDTHS, num_key_value_heads=4)
    found = storage_of(model)
    per_expert = 3 * 96 * 64 + 64 * 96 // 32 * 2 * 3  # numbers and scales
    padded = 2 * 32 * 64 * 34 // 32  # two halves of a panel
    assert sum(each.num_bytes for each in _matrices(model)) == 4 * 8 * (per_expert + padded)
    assert found.by_format["int8"] > 4 * 8 * (per_expert + padded)
    assert not [name for name, _ in model.named_parameters() if "experts" in name]
    checkpoint = checkpoint_of(model)
    assert checkpoint.report.bitwise
    engine, deployment = engines.over(checkpoint), deployment_of(checkpoint)
    asked = [
        request(deployment, list(range(2, length)), max_tokens=8, logprobs=3)
        for length in (40, 7, 23)
    ]
    together = answer(engine, *asked)
    assert together == [answer(engine, each)[0] for each in asked]


def _matrices(model: Any) -> list[Any]:
    held = [each for each in model.modules() if isinstance(each, LowBitExperts)]
    return [matrix for each in held for matrix in each.matrices.values()]


def test_a_weight_of_an_expert_that_is_too_large_is_refused_by_name() -> None:
    """A scale is a float16."""
    model = tiny_model("mixtral", **SIZES)
    model.model.layers[2].mlp.experts.down_proj.data[6, 3, 3] = 9e6
    with pytest.raises(ModelError, match=r"at most 8319008 .*layers\.2\.mlp\.experts\.down_proj"):
        quantise_model(model, byte_tokenizer())


@pytest.mark.parametrize(("case", "types"), FILES, ids=str)
def test_a_file_in_its_own_bits_answers_as_the_same_file_dequantised(
    tmp_path: Path, engines: EngineFactory, case: str, types: tuple[str, str, str]
) -> None:
    """Tokens and logprobs agree to the bit, and the storage is that of the plan."""
    path = expert_file(tmp_path / "m.gguf", types, case=case, width=256)
    results = []
    for weights in ("stored", "dequantised"):
        loaded = load_checkpoint(path, device="cpu", weights=weights)
        assert loaded.report.bitwise
        planned = planned_storage(read_model_config(path, device="cpu"), weights, is_divided=False)
        if weights == "stored":
            assert planned is not None
            assert loaded.low_bits is not None
            assert set(planned.by_format) == {BY_TYPE[each].name for each in types}
            assert planned.num_bytes == loaded.low_bits.num_bytes
        engine, deployment = engines.over(loaded), deployment_of(loaded)
        asked = [
            request(deployment, prompt, max_tokens=8, logprobs=3)
            for prompt in ([5, 9, 77, 3, 50, 8], list(range(2, 50)))
        ]
        results.append(answer(engine, *asked))
    assert results[0] == results[1]


def rounded(rows_RK: torch.Tensor) -> torch.Tensor:
    """Rows in eight bits with a scale for each 32 inputs, widened; in float64."""
    groups = rows_RK.float().reshape(len(rows_RK), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (127 / largest)).round()
    return (codes.double() * (largest / 127).double()).reshape(rows_RK.shape)


def in_float64(
    held: LowBitExperts, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts of each row, whose inputs of both products are rounded, and weights are not."""

    def matrix(name: str, expert: int) -> torch.Tensor:
        parts = held.matrices[name].parts_E[expert]
        return torch.cat([widened(part, torch.float32) for part in parts]).double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (x_K, experts) in enumerate(zip(rounded(x), choice.tolist(), strict=True)):
        for place, expert in enumerate(experts):
            gate, up = (matrix("gate_up_proj", expert) @ x_K).chunk(2)
            between = rounded((nn.functional.silu(gate) * up)[None])[0]
            out[row] += weights[row, place].double() * (matrix("down_proj", expert) @ between)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_round_their_rows_as_linears_do(dtype: torch.dtype) -> None:
    """The result is that of the rule in float64, and a row's bits do not depend on others."""
    model, _ = quantised("mixtral", dtype, **WIDTHS)
    held = model.model.layers[0].mlp.experts
    block = packed_block(model)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, 64, generator=generator).to(dtype)
    choice = torch.rand(60, 8, generator=generator).topk(3).indices
    choice[:, 0] = 5
    weights = torch.rand(60, 3, generator=generator)
    exact = block.experts(x, choice, weights)
    assert round_activations(block, dtype)
    found = block.experts(x, choice, weights)
    expected = in_float64(held, x, choice, weights)
    # A number near the middle of two codes may get the other one.
    most = 0.05 if dtype == torch.float32 else 0.5
    assert (found - expected).norm() < most * (exact - expected).norm()
    for rows in (slice(0, 1), slice(7, 12), slice(20, 37)):
        assert torch.equal(found[rows], block.experts(x[rows], choice[rows], weights[rows]))


def test_a_layer_with_one_matrix_of_floats_stays_floats(tmp_path: Path) -> None:
    """The plan says the same."""
    path = expert_file(tmp_path / "m.gguf", ("Q8_0", "Q8_0", "F32"), case="qwen3moe", width=64)
    loaded = load_checkpoint(path, device="cpu")
    assert (
        planned_storage(read_model_config(path, device="cpu"), "stored", is_divided=False) is None
    )
    assert loaded.low_bits is None


def test_experts_of_a_file_are_never_held_as_floats(tmp_path: Path) -> None:
    """The peak of a load's tensors is a fraction of the floats; panels are not tensors."""
    path = expert_file(tmp_path / "m.gguf", ("Q8_0", "Q8_0", "Q8_0"), case="qwen3moe", width=1024)
    num_weights = 4 * 8 * 3 * 256 * 1024
    meter = TensorMeter()
    with meter:
        load_gguf_model(path, gguf_config(path), torch.float32, keeps_bits=True)
    assert 0 < meter.read().peak < num_weights
