"""Tiny random models written as GGUF and read back: weights to the bit, logits, tables."""

import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from ropewalk.model_runtime.formats.gguf.gguf_architectures import ALTERNATIVES, ARCHITECTURES
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config, load_gguf_model
from ropewalk.model_runtime.loading.model_config import read_model_config, torch_dtype
from tests.checkpoints.gguf_cases import CASES, Case
from tests.checkpoints.gguf_files import Written, as_float32, quantised, same_weights
from tests.gguf_page import page

IDS = [case.name for case in CASES]


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def case_and_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path]:
    """A case, and its model in a file."""
    case: Case = request.param
    return case, case.write(tmp_path_factory.mktemp("gguf") / f"{case.name}.gguf")


@pytest.fixture(scope="module")
def model(case_and_file: tuple[Case, Path]) -> PreTrainedModel:
    """The model that was written."""
    return case_and_file[0].model()


def test_every_architecture_of_the_table_has_a_case() -> None:
    """A new architecture needs a model that is written and read."""
    assert {case.architecture for case in CASES} == set(ARCHITECTURES)
    kinds = [*ARCHITECTURES.values(), *(kind for _, kind in ALTERNATIVES.values())]
    assert {case.model_type for case in CASES} == {kind.model_type for kind in kinds}


def test_the_page_is_written_from_the_tables() -> None:
    """`python -m tests.gguf_page > docs/reference/gguf.md` after a change."""
    assert (Path(__file__).parents[3] / "docs/reference/gguf.md").read_text() == page()


def test_weights_and_logits_are_those_of_the_written_model(
    case_and_file: tuple[Case, Path], model: PreTrainedModel
) -> None:
    """The file's model has the same weights and gives the same logits, to the bit."""
    path = case_and_file[1]
    loaded = load_gguf_model(path, gguf_config(path), torch.float32).eval()
    assert type(loaded) is type(model)
    assert same_weights(loaded, model)
    ids = torch.randint(0, model.config.vocab_size, (1, 40), generator=torch.manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_the_file_passes_the_self_check(
    case_and_file: tuple[Case, Path], model: PreTrainedModel
) -> None:
    """The whole load gives a checkpoint that can be served."""
    path = case_and_file[1]
    phases: list[str] = []
    checkpoint = load_checkpoint(path, device="cpu", on_phase=phases.append)
    assert [phase.split()[0] for phase in phases] == ["loading", "dequantising", "checking"]
    size = r"[\d.]+ [KM]iB"
    assert re.fullmatch(f"dequantising {size} of GGUF to {size} of float32", phases[1])
    assert checkpoint.native.native_len >= model.config.max_position_embeddings
    assert checkpoint.eos_token_ids == {1}
    # The plan that is made without weights equals the loaded model.
    plain = read_model_config(path, device="cpu")
    assert plain.native() == checkpoint.native
    shapes = {index: (plan.num_key_heads, plan.key_dim) for index, plan in checkpoint.plans.items()}
    assert shapes == {
        index: (each.num_key_heads, each.key_dim) for index, each in plain.layers().items()
    }
    # Files have some buffers, too, such as the biases of experts' scores.
    stored = model.state_dict().keys()
    tensors = [*model.parameters()]
    tensors += [each for name, each in model.named_buffers() if name in stored]
    assert plain.num_parameters() == sum(each.numel() for each in tensors)


def test_the_number_type_of_a_gpu_is_the_matrices_own(tmp_path: Path) -> None:
    """Quantised weights are served in bfloat16, whose range is float32's."""
    case = next(case for case in CASES if case.name == "qwen2")
    for kind, expected in (("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")):
        encode = as_float32 if kind == "F32" else quantised(GGMLQuantizationType[kind])
        path = case.write(tmp_path / "m.gguf", Written(encode=encode))
        config = gguf_config(path)
        assert torch_dtype("auto", config, torch.device("cuda")) == getattr(torch, expected)
        assert torch_dtype("auto", config, torch.device("cpu")) == torch.float32
