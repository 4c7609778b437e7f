"""What follows from the card that is there: how keys are cut, and which prompts are rows."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.cards.card import Card, card_of
from ropewalk.model_runtime.gpu.cards.tuning import Sizes, Tuning, best_tuning
from ropewalk.model_runtime.runner import cuda_graphs
from tests.gpu_targets import CARDS

# Processors, bytes of shared memory, clock in kHz and bits of the memory, and bytes a second on the
# data sheet.
SAID = {
    "H200": (132, 233_472, 3_201_000, 6144, 4.8e12),
    "A100 80GB": (108, 167_936, 1_593_000, 5120, 2.039e12),
    "RTX 4090": (128, 102_400, 10_501_000, 384, 1.008e12),
    "RTX 5090": (170, 102_400, 14_001_000, 512, 1.792e12),
}
CUDA = torch.device("cuda", 0)


def card_with(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> Card:
    """The card that is found if the driver says these numbers."""
    names = (
        *("multi_processor_count", "shared_memory_per_multiprocessor"),
        *("memory_clock_rate", "memory_bus_width"),
    )
    said = SimpleNamespace(**dict(zip(names, numbers, strict=True)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: said)
    found: Card = card_of.__wrapped__(CUDA)
    return found


@pytest.mark.parametrize("name", SAID)
def test_a_card_has_the_numbers_of_its_data_sheet(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate follows from the clock and the width of the memory."""
    *said, bytes_s = SAID[name]
    card = card_with(monkeypatch, *map(int, said))
    assert (card.num_processors, card.shared_bytes) == (said[0], said[1])
    assert card.bytes_s == pytest.approx(bytes_s, rel=0.03)


def test_prompts_are_rows_by_the_rate_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 keeps the 16 GiB that were measured there; other cards take as long."""

    def most(name: str) -> int:
        card = card_with(monkeypatch, *map(int, SAID[name][:4]))
        monkeypatch.setattr(cuda_graphs, "card_of", lambda _: card)
        return cuda_graphs.most_prompt_bytes(CUDA)

    assert most("H200") == pytest.approx(2**34, rel=0.03)
    assert most("RTX 4090") == pytest.approx(2**34 * 1.008 / 4.8, rel=0.03)


def test_a_driver_that_knows_no_clock_leaves_rows_to_short_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A memory that the host shares may have no clock of its own."""
    assert card_with(monkeypatch, 48, 102_400, 0, 0).bytes_s == 2e11


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
