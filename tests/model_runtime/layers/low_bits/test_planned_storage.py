"""The stated bytes of weights in few bits are those that a loaded model holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.low_bits.product import LowBitProduct
from ropewalk.model_runtime.layers.packed_linear import products_of
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.low_bits.active import active_part
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL, read_model_config
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written, as_float32, quantised
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer_fast

# All linears of a layer have 64 outputs or a multiple of it, and a multiple of 32 inputs.
WHOLE = {"num_key_value_heads": 4, "intermediate_size": 128}
# Their tiny models have experts of at least 64 outputs, which are quantised.
MIXTURES = (
    *("granitemoe", "aria_text", "granitemoe_swa", "gpt_oss", "cohere2_moe", "flex_olmo"),
    *("granitemoeshared", "minimax_m2", "mixtral", "olmoe"),
)


def held_bytes(loaded: Checkpoint) -> int:
    """The bytes of all tensors and buffers that a loaded model's products and modules hold."""
    low = [each for each in products_of(loaded.model) if isinstance(each, LowBitProduct)]
    panels = {id(weight): weight.memory.nbytes for each in low for weight in each.weights}
    embedding: Any = loaded.model.get_input_embeddings()
    panels[id(embedding.panels)] = embedding.panels.memory.nbytes
    floats = sum(each.nbytes for each in loaded.model.parameters() if each.device.type == "cpu")
    return sum(panels.values()) + floats


def test_the_embedded_model_in_int8_is_near_the_stored_one_and_its_memory_is_as_planned() -> None:
    """Issue 24: the divergence is at most 0.002 nats."""
    loaded = load_checkpoint(EMBEDDED_MODEL, device="cpu", weights="int8")
    assert loaded.report.bitwise
    assert loaded.distance is not None
    assert 0 < loaded.distance.divergence < 0.002
    assert loaded.low_bits is not None
    outline = read_model_config(EMBEDDED_MODEL, device="cpu")
    planned = planned_storage(outline, "int8", is_divided=False)
    assert planned is not None
    assert planned.num_bytes == loaded.low_bits.num_bytes
    assert planned.num_bytes == held_bytes(loaded)


def test_floats_beside_few_bits_are_counted_as_they_are_held(tmp_path: Path) -> None:
    """Keys and up-projections are floats. They lie in panels of float32."""
    case = next(case for case in CASES if case.name == "llama")
    case = replace(case, overrides={**case.overrides, **WHOLE})

    def encode(name: str, values: Any) -> Any:
        is_float = "attn_k" in name or "ffn_up" in name
        return (as_float32 if is_float else quantised(Type.Q8_0))(name, values)

    path = case.write(tmp_path / "m.gguf", Written(encode=encode))
    planned = planned_storage(
        read_model_config(path, device="cpu", dtype="bfloat16"), "stored", is_divided=False
    )
    loaded = load_checkpoint(path, device="cpu", dtype="bfloat16")
    assert planned is not None
    assert loaded.low_bits is not None
    assert planned.num_bytes == loaded.low_bits.num_bytes == held_bytes(loaded)


@pytest.mark.long  # up to 46 seconds each, to compile
@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_of_int8_are_planned_as_they_are_held(tmp_path: Path, architecture: str) -> None:
    """Their tensors have many names, and gates and ups may be one of them."""
    tiny_model(architecture).save_pretrained(tmp_path)
    byte_tokenizer_fast().save_pretrained(tmp_path)
    outline = read_model_config(tmp_path, device="cpu")
    planned = planned_storage(outline, "int8", is_divided=False)
    loaded = load_checkpoint(tmp_path, device="cpu", weights="int8").low_bits
    assert planned is not None
    assert loaded is not None
    assert planned.by_format == loaded.by_format
    assert planned.expert_bytes == loaded.expert_bytes
    assert planned.num_bytes == loaded.num_bytes
    active = active_part(outline, planned)
    assert active is not None
    assert active.num_bytes < active.num_all_bytes


def test_int8_is_refused_where_its_kernels_are_not() -> None:
    """A GPU, or several processes."""
    outline = read_model_config(EMBEDDED_MODEL, device="cpu")
    with pytest.raises(ModelError, match="weights: int8 is not divided among processes"):
        planned_storage(outline, "int8", is_divided=True)
