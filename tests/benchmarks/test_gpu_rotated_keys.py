"""The caches that rotate-at-read is compared to: they must do what they are named for."""

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_model_inputs import TINY, random_model, taken_over
from benchmarks.gpu_rotated_keys import KINDS
from model_runtime.batch import Span
from model_runtime.build_engine import build_runner
from model_runtime.checkpoint import Checkpoint
from rope import Angles, Profile, Yarn, rotate

SCALED = Profile(Yarn(factor=4.0, original_max_position_embeddings=64))
LONGER = Profile(Yarn(factor=8.0, original_max_position_embeddings=64))


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A tiny model, taken over."""
    model = random_model(TINY.shape, TINY.native_len, TINY.dtype, torch.device("cpu"))
    return taken_over(model)


def logits(checkpoint: Checkpoint, kind: str) -> Tensor:
    """Two sequences under two tables: a prompt in two chunks, and steps of one token each."""
    runner = build_runner(checkpoint, TINY.config(64, 2), [SCALED, LONGER], KINDS[kind])
    ids = torch.arange(300).mul(37).remainder(2048).tolist()
    slots = [runner.table_slot(SCALED), runner.table_slot(LONGER)]

    def span(which: int, first: int, end: int) -> Span:
        pages = [3 * which, 3 * which + 1, 3 * which + 2]
        known = ids[100 * which :]
        return Span(known[first:end], first, pages, slots[which], range(end - first))

    rows = [
        runner.run([span(0, 0, 50), span(1, 0, 70)]),
        runner.run([span(0, 50, 90), span(1, 70, 71)]),
        runner.run([span(0, 90, 91), span(1, 71, 72)]),
    ]
    return torch.cat(rows)


def test_keys_rotated_at_the_write_answer_as_keys_rotated_at_the_read(
    checkpoint: Checkpoint,
) -> None:
    """while nobody crosses; attention factors and mixed batches included"""
    read_TV, write_TV, none_TV = (logits(checkpoint, kind) for kind in ("read", "write", "none"))
    assert float((write_TV - read_TV).abs().max()) < 1e-3
    assert float((none_TV - read_TV).abs().max()) > 0.1


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_the_kernel_turns_as_the_formula_does(heads: tuple[int, int]) -> None:
    """queries and keys, from strides of their own"""
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    from benchmarks.gpu_rotation import turned

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    joined = torch.randn(7, sum(heads), 2, 20, device=device)
    query_THD, key_TKD = joined[:, :, 1].split(heads, dim=1)
    angle_TP = torch.rand(7, 10, device=device) * 6
    angles = Angles(1.3 * angle_TP.cos(), 1.3 * angle_TP.sin())
    per_head = Angles(angles.cos[:, None], angles.sin[:, None])
    for got, given in zip(turned(query_THD, key_TKD, angles), (query_THD, key_TKD), strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, rotate(given, per_head))
