"""Models with weights in few bits are ordinary models with the widened weights."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE, INT8
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (
    PanelWriter,
    gathered,
    int8_parts,
    widened,
)
from ropewalk.model_runtime.cpu_kernels.trials import multiplies_pairs
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.experts.low_bit import LowBitExperts
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.layers.low_bits.modules import LowBitEmbedding, LowBitLinear
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.low_bits.quantise import distance, quantise_model
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written, as_float32, quantised
from tests.checkpoints.random_blocks import like
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.doubles.tokens import byte_tokenizer

# All linears of a layer have 64 outputs and a multiple of 32 inputs.
WHOLE = {"num_key_value_heads": 4, "intermediate_size": 128}


def widened_copy(model: Any, before: Any) -> Any:
    """The model before its quantisation, with the weights that it has afterwards."""
    dtype = next(before.parameters()).dtype
    for name, module in model.named_modules():
        if isinstance(module, LowBitLinear | LowBitEmbedding):
            before.get_submodule(name).weight.data.copy_(widened(module.panels, dtype))
    return before


def quantised_pair(architecture: str, dtype: torch.dtype, **overrides: Any) -> tuple[Any, Any]:
    """A tiny model that is quantised, and a float model with the same weights."""
    model = in_dtype(tiny_model(architecture, **overrides), dtype)
    before = copy.deepcopy(model)
    quantise_model(model, byte_tokenizer())
    return model, widened_copy(model, before)


def logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of a plain forward of transformers."""
    with torch.inference_mode():
        found: Tensor = model(ids).logits
    return found


def error(found: Tensor, exact: Tensor) -> float:
    """The root of the mean square of a difference."""
    return (found.float() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("dtype", "is_tied"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_a_quantised_model_answers_as_the_float_model_with_its_weights(
    engines: EngineFactory, dtype: torch.dtype, *, is_tied: bool
) -> None:
    """Plain forwards agree; served tokens and logprobs agree to the bit, alone and in a batch.

    In bfloat16 the float model has rounded weights, so both are compared with float32: the panels
    keep 0.85 to 0.95 of the float model's error, by the seed of the prompt.
    """
    model, plain = quantised_pair("llama", dtype, tie_word_embeddings=is_tied, **WHOLE)
    low = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    assert len(low) == 4 * 7 + 1
    assert isinstance(model.get_input_embeddings(), LowBitEmbedding)
    if is_tied:
        assert model.get_output_embeddings().panels is model.get_input_embeddings().panels
    ids = torch.randint(0, 199, (1, 40), generator=torch.manual_seed(1))
    if dtype == torch.float32:
        torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=0, atol=1e-5)
    else:
        exact = logits(widened_copy(model, copy.deepcopy(plain).float()), ids)
        assert error(logits(model, ids), exact) < 1.1 * error(logits(plain, ids), exact)
    found = checkpoint_of(model)
    assert found.report.bitwise
    numbers = "bfloat16" if multiplies_pairs(dtype) else "float32"
    assert found.products == f"int8 panels, multiplied in {numbers}"
    assert isinstance(vars(found.model).get("forward"), DecoderLayers)
    engine, deployment = engines.over(found), deployment_of(found)
    prompts = [ids[0, :length].tolist() for length in (40, 7, 23)]
    requests = [request(deployment, each, max_tokens=12, logprobs=3) for each in prompts]
    together = answer(engine, *requests)
    alone = [
        answer(
            engine,
            request(
                deployment,
                each,
                max_tokens=12,
                logprobs=3,
            ),
        )[0]
        for each in prompts
    ]
    assert together == alone
    if dtype == torch.float32:
        expected = answer(engines.over(checkpoint_of(plain)), *requests)
        assert together == expected


def test_weights_that_do_not_fit_stay_floats() -> None:
    """Inputs that are no multiple of 32, and fewer than 64 outputs.

    Keys read the tensor of queries, so all of them are one product.
    """
    model, _ = quantised_pair("llama", torch.float32, intermediate_size=100)
    layer = model.model.layers[0]
    assert type(layer.mlp.down_proj) is torch.nn.Linear  # 100 inputs
    assert type(layer.self_attn.k_proj) is torch.nn.Linear  # 32 outputs
    assert isinstance(layer.mlp.gate_proj, LowBitLinear)
    found = checkpoint_of(model)
    assert found.report.bitwise
    text = "int8 and float32 panels, multiplied in float32 and oneDNN packed float32"
    assert found.products == text


def test_a_model_without_a_fitting_weight_is_refused() -> None:
    """The sentence says what int8 needs."""
    model = tiny_model("llama", hidden_size=48, intermediate_size=100, head_dim=12)
    with pytest.raises(ModelError, match=r"int8 needs linears with a multiple of 32 inputs"):
        quantise_model(model, byte_tokenizer())


def test_routers_and_narrow_experts_stay_floats() -> None:
    """An error in a router chooses another expert; 32 outputs would be half a panel."""
    model, _ = quantised_pair("qwen3_moe", torch.float32, **WHOLE)
    assert not any(isinstance(each, LowBitExperts) for each in model.modules())
    names = [name for name, each in model.named_modules() if isinstance(each, LowBitLinear)]
    assert names
    assert not [name for name in names if "gate" in name.split(".") or "experts" in name]


def test_the_distance_is_the_mean_divergence_of_the_next_token() -> None:
    """By hand: one row alike, and one of (1/2, 1/2) against (1/4, 3/4)."""
    before = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    after = torch.tensor([[1.0, 1.0], [0.25, 0.75]])
    after[1].log_()
    expected = 0.5 * torch.tensor([2.0, 2.0 / 3.0]).log().sum() / 2
    found = distance(before, after)
    assert found.divergence == pytest.approx(float(expected), rel=1e-6)
    assert (found.agreement, found.num_tokens) == (0.5, 2)


# All types that are kept, and two that are not.
TYPES = (*BY_TYPE, "TQ2_0", "F16")
# Projections of 96, 48 and 48 rows share panels. Inputs of 96 are no multiple of 256, so that only
# types with small blocks fit there.
MIXED = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "vocab_size": 320,
}


class _EveryType:
    """Encodes the matrices of a model in all types in turn."""

    def __init__(self) -> None:
        self._next = 0
        self.used: dict[str, str] = {}

    def __call__(self, name: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
        """Encode a tensor; vectors stay floats."""
        if values.ndim == 1:
            return values, Type.F32
        turn = [TYPES[(self._next + step) % len(TYPES)] for step in range(len(TYPES))]
        sizes = gguf.GGML_QUANT_SIZES
        found = next(each for each in turn if values.shape[1] % sizes[Type[each]][0] == 0)
        self._next += 1
        self.used[name] = found
        if found == "F16":
            return values.astype(np.float16), Type.F16
        return like(values, found, self._next), Type[found]


@pytest.mark.long
def test_a_file_in_its_own_bits_answers_as_the_same_file_dequantised(
    tmp_path: Path, engines: EngineFactory
) -> None:
    """Tokens and logprobs agree to the bit, with the rows of q and k in another order.

    One file has all types, because each set of types is compiled. No projection is called alone.
    """
    case = next(case for case in CASES if case.name == "llama")
    case = replace(case, overrides={**case.overrides, **MIXED})
    every = _EveryType()
    path = case.write(tmp_path / "m.gguf", Written(encode=every))
    used = set(every.used.values())
    assert len(used) >= len(TYPES) - 1  # a type of large blocks may miss its turns
    results = []
    for weights in ("stored", "dequantised"):
        loaded = load_checkpoint(path, device="cpu", weights=weights)
        planned = planned_storage(read_model_config(path, device="cpu"), weights, is_divided=False)
        assert planned == loaded.low_bits or planned.num_bytes == loaded.low_bits.num_bytes
        assert (planned is None) == (weights == "dequantised")
        if planned is not None:
            assert set(planned.by_format) == {
                BY_TYPE[each].name for each in used if each in BY_TYPE
            }
        assert isinstance(vars(loaded.model).get("forward"), DecoderLayers)
        engine, deployment = engines.over(loaded), deployment_of(loaded)
        prompts = [[5, 9, 77, 3, 50, 8], list(range(2, 60))]
        requests = [request(deployment, each, max_tokens=12, logprobs=3) for each in prompts]
        results.append(answer(engine, *requests))
    assert results[0] == results[1]


@pytest.mark.long
def test_int8_leaves_a_file_of_few_bits_as_it_is(tmp_path: Path) -> None:
    """Nothing is left to quantise, so there is no distance."""
    case = next(case for case in CASES if case.name == "llama")
    case = replace(case, overrides={**case.overrides, **WHOLE})
    path = case.write(tmp_path / "m.gguf", Written(encode=quantised(Type.Q4_0)))
    loaded = load_checkpoint(path, device="cpu", weights="int8")
    assert loaded.distance is None
    assert loaded.low_bits is not None
    assert set(loaded.low_bits.by_format) == {"Q4_0"}


@pytest.mark.long
def test_int8_quantises_the_floats_of_a_file_beside_its_few_bits(tmp_path: Path) -> None:
    """The embedding keeps its type, and the linears of the block become int8."""
    case = next(case for case in CASES if case.name == "llama")
    case = replace(case, overrides={**case.overrides, **WHOLE})

    def encode(name: str, values: Any) -> Any:
        few = name.startswith(("token_embd", "output."))
        return quantised(Type.Q4_0)(name, values) if few else as_float32(name, values)

    path = case.write(tmp_path / "m.gguf", Written(encode=encode))
    loaded = load_checkpoint(path, device="cpu", weights="int8")
    assert loaded.low_bits is not None
    assert set(loaded.low_bits.by_format) == {"Q4_0", "int8"}
    assert loaded.distance is not None
    planned = planned_storage(read_model_config(path, device="cpu"), "int8", is_divided=False)
    assert planned is not None
    assert planned.num_bytes == loaded.low_bits.num_bytes


def test_a_weight_that_is_too_large_is_refused_by_name() -> None:
    """A scale is a float16, and 127 times its largest number is the largest weight."""
    model = tiny_model("llama", **WHOLE)
    model.model.layers[1].mlp.up_proj.weight.data[70, 3] = 9e6
    with pytest.raises(ModelError, match=r"at most 8319008 in .*layers\.1\.mlp\.up_proj\.weight"):
        quantise_model(model, byte_tokenizer())


@pytest.mark.parametrize("token_id", [70, 100_000, -1])
def test_a_row_outside_the_embedding_is_an_error(token_id: int) -> None:
    """As with torch's embedding."""
    weight_NK = torch.ones(70, 64)
    writer = PanelWriter(INT8, 70, 64)
    writer.write(0, int8_parts(weight_NK))
    assert gathered(writer.panels, np.array([69]), torch.float32).shape == (1, 64)
    with pytest.raises(IndexError, match="rows must be"):
        gathered(writer.panels, np.array([3, token_id]), torch.float32)


@pytest.mark.long
def test_a_model_of_floats_does_not_import_the_kernels_of_few_bits() -> None:
    """A load and a product, in a new interpreter."""
    code = (
        "import sys\n"
        "from ropewalk.model_runtime.loading.checkpoint import load_checkpoint\n"
        "from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL\n"
        "load_checkpoint(EMBEDDED_MODEL, device='cpu')\n"
        "assert 'ropewalk.model_runtime.cpu_kernels.skinny_gemm' in sys.modules\n"
        "found = [each for each in sys.modules if 'cpu_kernels.low_bits.' in each]\n"
        "print([each for each in found if not each.endswith('.formats')])\n"
    )
    root = Path(__file__).resolve().parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_factor_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """The sentence names the tensor."""
    case = next(case for case in CASES if case.name == "llama")

    def encode(name: str, values: Any) -> Any:
        found, kind = quantised(Type.Q8_0)(name, values)
        if kind is Type.Q8_0 and "ffn_down" in name:
            found[0, :2] = [0x00, 0x7C]  # infinity
        return found, kind

    path = case.write(tmp_path / "m.gguf", Written(encode=encode))
    assert gguf.GGUFReader(path).tensors
    with pytest.raises(ModelError, match=r"tensor blk\.\d+\.ffn_down\.weight has NaN or Inf"):
        load_checkpoint(path, device="cpu")
