"""Tiny random models written as GGUF and read back: weights to the bit, logits, tables."""

from pathlib import Path

import pytest
import torch

from model_runtime.gguf.architectures import ALTERNATIVES, ARCHITECTURES
from model_runtime.loading.checkpoint import load_checkpoint
from model_runtime.loading.gguf_checkpoint import gguf_config, load_gguf_model
from tests.gguf_cases import CASES, Case
from tests.gguf_files import same_weights
from tests.gguf_page import page

IDS = [case.name for case in CASES]


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def case_and_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path]:
    """A case, and its model in a file."""
    case: Case = request.param
    return case, case.write(tmp_path_factory.mktemp("gguf") / f"{case.name}.gguf")


def test_every_architecture_of_the_table_has_a_case() -> None:
    """A new architecture needs a model that is written and read."""
    assert {case.architecture for case in CASES} == set(ARCHITECTURES)
    kinds = [*ARCHITECTURES.values(), *(kind for _, kind in ALTERNATIVES.values())]
    assert {case.model_type for case in CASES} == {kind.model_type for kind in kinds}


def test_the_page_is_written_from_the_tables() -> None:
    """`python -m tests.gguf_page > docs/gguf.md` after a change."""
    assert (Path(__file__).parents[3] / "docs" / "gguf.md").read_text() == page()


def test_weights_and_logits_are_those_of_the_written_model(
    case_and_file: tuple[Case, Path],
) -> None:
    """The file's model has the same weights and gives the same logits, to the bit."""
    case, path = case_and_file
    model = case.model()
    loaded = load_gguf_model(path, gguf_config(path), torch.float32).eval()
    assert type(loaded) is type(model)
    assert same_weights(loaded, model)
    ids = torch.randint(0, model.config.vocab_size, (1, 40), generator=torch.manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_the_file_passes_the_self_check(case_and_file: tuple[Case, Path]) -> None:
    """The whole load gives a checkpoint that can be served."""
    case, path = case_and_file
    checkpoint = load_checkpoint(path, device="cpu")
    assert checkpoint.native.native_len >= case.model().config.max_position_embeddings
    assert checkpoint.eos_token_ids == {1}
