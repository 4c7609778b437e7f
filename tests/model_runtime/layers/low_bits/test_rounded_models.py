"""Models that round their activations: bits, distance, memory and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ropewalk.model_runtime.cpu_kernels.low_bits.grouped import integer_dot
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.layers.packed_linear import products_of
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint, prepare_model
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.low_bits.quantise import quantise_model
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL, read_model_config
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written, quantised
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.tokens import byte_tokenizer

# All linears of a layer have 64 outputs or a multiple of it, and a multiple of 32 inputs.
WHOLE = {"num_key_value_heads": 4, "intermediate_size": 128}


def prepared(dtype: torch.dtype, activations: str) -> Checkpoint:
    """A tiny Llama in int8."""
    model = in_dtype(tiny_model("llama", **WHOLE), dtype)
    quantise_model(model, byte_tokenizer())
    return prepare_model(model, byte_tokenizer(), frozenset(), {}, activations=activations)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)]
)
def test_answers_with_rounded_activations_are_alike_alone_and_in_a_batch(
    engines: EngineFactory, dtype: torch.dtype
) -> None:
    """The one call of a decode step and prompts in chunks have the same bits."""
    found, exact = prepared(dtype, "int8"), prepared(dtype, "exact")
    assert found.report.bitwise
    assert found.rounding is not None
    assert exact.rounding is None
    assert found.products == "int8 panels, multiplied in integers, rows rounded to int8"
    assert all(each.is_rounding for each in products_of(found.model))
    assert isinstance(vars(found.model).get("forward"), DecoderLayers)
    engine, deployment = engines.over(found), deployment_of(found)
    ids = torch.randint(0, 199, (40,), generator=torch.manual_seed(1)).tolist()
    requests = [
        request(deployment, ids[:length], max_tokens=12, logprobs=3) for length in (40, 7, 23)
    ]
    together = answer(engine, *requests)
    assert together == [answer(engine, each)[0] for each in requests]
    # A random model's tokens move, so the setting has done something.
    assert together != answer(engines.over(exact), *requests)


def test_the_embedded_model_moves_little_and_its_memory_is_as_planned() -> None:
    """The divergence from exact activations is of the size of that of int8 weights."""
    loaded = load_checkpoint(EMBEDDED_MODEL, device="cpu", weights="int8", activations="int8")
    assert loaded.report.bitwise
    assert loaded.rounding is not None
    assert 1e-7 < loaded.rounding.divergence < 0.005
    assert loaded.rounding.agreement > 0.9
    assert "nats from exact activations" in str(loaded.rounding)
    planned = planned_storage(
        read_model_config(EMBEDDED_MODEL, device="cpu"), "int8", "int8", is_divided=False
    )
    assert planned is not None
    assert loaded.low_bits is not None
    assert planned.num_bytes == loaded.low_bits.num_bytes
    assert planned.products("float32") == loaded.products


@pytest.mark.parametrize(
    ("most", "others"),
    [
        (Type.Q8_0, {}),
        pytest.param(
            Type.Q4_0,
            {"attn_v": Type.Q8_0, "ffn_down": Type.Q5_1},
            marks=pytest.mark.long,  # fifteen seconds to compile
        ),
    ],
    ids=("one", "several"),
)
def test_a_gguf_file_is_rounded_too(tmp_path: Path, most: Type, others: dict[str, Type]) -> None:
    """Its banner's distance is that of its own bits with exact activations."""
    case = next(case for case in CASES if case.name == "llama")
    case = replace(case, overrides={**case.overrides, **WHOLE})

    def encode(name: str, values: object) -> object:
        kind = next((each for part, each in others.items() if part in name), most)
        return quantised(kind)(name, values)

    path = case.write(tmp_path / "m.gguf", Written(encode=encode))  # type: ignore[arg-type]
    loaded = load_checkpoint(path, device="cpu", activations="int8")
    assert loaded.report.bitwise
    assert loaded.distance is None
    assert loaded.rounding is not None
    assert 0 < loaded.rounding.divergence < 0.05
    assert isinstance(vars(loaded.model).get("forward"), DecoderLayers)


@pytest.mark.parametrize("multiplies_bytes", [True, False])
def test_auto_rounds_the_stored_bits_of_a_file_where_bytes_are_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, multiplies_bytes: bool
) -> None:
    """Plans and loads agree. Plain weights, and those that a load quantises, stay exact."""
    monkeypatch.setattr(integer_dot, "MULTIPLIES_BYTES", multiplies_bytes)
    case = next(case for case in CASES if case.name == "llama")
    path = case.write(tmp_path / "m.gguf", Written(encode=quantised(Type.Q8_0)))
    outline = read_model_config(path, device="cpu")
    planned = planned_storage(outline, "stored", "auto", is_divided=False)
    assert planned is not None
    assert planned.is_rounding == multiplies_bytes
    loaded = load_checkpoint(path, device="cpu", activations="auto")
    assert (loaded.rounding is not None) == multiplies_bytes
    assert planned_storage(outline, "stored", "auto", is_divided=True) is None
    assert planned_storage(outline, "dequantised", "auto", is_divided=False) is None
    plain = read_model_config(EMBEDDED_MODEL, device="cpu")
    assert planned_storage(plain, "stored", "auto", is_divided=False) is None
    quantised_here = planned_storage(plain, "int8", "auto", is_divided=False)
    assert quantised_here is not None
    assert not quantised_here.is_rounding


def test_what_cannot_round_is_refused_with_the_settings_name(tmp_path: Path) -> None:
    """Floats, several processes, and another device."""
    with pytest.raises(
        ModelError, match=r"^activations: int8 needs linears or experts with quantised weights"
    ):
        load_checkpoint(EMBEDDED_MODEL, device="cpu", activations="int8")
    outline = read_model_config(EMBEDDED_MODEL, device="cpu")
    with pytest.raises(ModelError, match="activations: int8 needs linears"):
        planned_storage(outline, "stored", "int8", is_divided=False)
    with pytest.raises(ModelError, match="activations: int8 is not divided among processes"):
        planned_storage(outline, "dequantised", "int8", is_divided=True)
    gpu = replace(outline, device=torch.device("cuda"))
    with pytest.raises(ModelError, match="activations: int8 is served on a CPU only"):
        planned_storage(gpu, "stored", "int8", is_divided=False)
