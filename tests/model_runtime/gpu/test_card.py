"""What follows from the card that is there: how keys are cut."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.cards.tuning import Sizes, Tuning, best_tuning
from tests.gpu_targets import CARDS


@pytest.mark.parametrize(
    ("capability", "dim", "stages", "programs"),
    [
        *((80, 128, 5, 2), (80, 256, 3, 2)),
        *((86, 64, 5, 2), (86, 128, 3, 2), (86, 256, 5, 1)),
        *((89, 128, 3, 2), (90, 128, 5, 2), (90, 256, 5, 2), (120, 128, 3, 2)),
    ],
)
def test_programs_of_a_decode_fit_their_processor(
    capability: int, dim: int, stages: int, programs: int
) -> None:
    """The sizes of Llama 3 and Gemma 2; tests/gpu_targets.py compiles with what is chosen here."""
    sizes = Sizes(group=4, num_pairs=dim // 2, dim=dim, value_dim=dim, dtype=torch.bfloat16)
    assert best_tuning(CARDS[capability], sizes) == Tuning(4, stages, programs)
