"""The caches that rotate-at-read is compared with really rotate when their names say.

On a GPU where there is one, as in `make gpu-check`.
"""

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_model_inputs import PAGE_SIZE, TINY, random_model, taken_over
from benchmarks.gpu_rotated_keys import KINDS, RotatedStep
from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.paged_attention import AttentionCall
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits, cuda_recorder
from ropewalk.rope import Profile, Yarn, native_rope
from ropewalk.rope.angles import Angles, rotate

pytestmark = pytest.mark.costly(by="file")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALED = Profile(Yarn(factor=4.0, original_max_position_embeddings=64))
LONGER = Profile(Yarn(factor=8.0, original_max_position_embeddings=64))
CONFIG = TINY.config(64, 2)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A tiny model, taken over."""
    return taken_over(random_model(TINY.shape, TINY.native_len, TINY.dtype, DEVICE))


def logits(checkpoint: Checkpoint, kind: str, *, is_recorded: bool = False) -> Tensor:
    """Two sequences under two tables: a prompt in two chunks, and steps of one token each."""
    runner = build_runner(checkpoint, CONFIG, [SCALED, LONGER], KINDS[kind])
    if is_recorded:
        limits = CONFIG.max_model_len, CONFIG.max_num_seqs, CONFIG.num_pages
        runner.capture_graphs(CaptureLimits(*limits), cuda_recorder(DEVICE))
    ids = torch.arange(300).mul(37).remainder(2048).tolist()
    table_ids = [runner.table_id(SCALED), runner.table_id(LONGER)]

    def span(which: int, first: int, end: int) -> Span:
        pages = [3 * which, 3 * which + 1, 3 * which + 2]
        known = ids[100 * which :]
        return Span(known[first:end], first, pages, table_ids[which], range(end - first))

    rows = [
        runner.run([span(0, 0, 50), span(1, 0, 70)]).clone(),
        runner.run([span(0, 50, 90), span(1, 70, 71)]).clone(),
        runner.run([span(0, 90, 91), span(1, 71, 72)]).clone(),
        runner.run([span(1, 72, 73)]).clone(),
    ]
    return torch.cat(rows)


def test_keys_rotated_at_the_write_answer_as_keys_rotated_at_the_read(
    checkpoint: Checkpoint,
) -> None:
    """No sequence crosses a tier; attention factors and mixed batches are included."""
    read_TV, write_TV, none_TV = (logits(checkpoint, kind) for kind in KINDS)
    assert float((write_TV - read_TV).abs().max()) < 1e-3
    assert float((none_TV - read_TV).abs().max()) > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="torch finds no CUDA device here")
@pytest.mark.parametrize("kind", list(KINDS))
def test_recorded_steps_are_those_of_their_kind(checkpoint: Checkpoint, kind: str) -> None:
    """A replayed step answers like the same kernels launched one by one."""
    recorded_TV = logits(checkpoint, kind, is_recorded=True)
    assert float((recorded_TV - logits(checkpoint, kind)).abs().max()) < 1e-3


class Nowhere:
    """An attention that returns its query without reading."""

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the query."""
        return call.query_1HTD


@pytest.mark.parametrize("lengths", [(1, 1), (3, 1)])
def test_turning_asks_the_device_for_nothing(lengths: tuple[int, int]) -> None:
    """Torch's `meta` device raises if a number is read, which would prevent a recording."""
    meta = torch.device("meta")
    native = native_rope({"max_position_embeddings": 64, "head_dim": 16, "rope_theta": 5e5})
    tables = RopeTables(native, PAGE_SIZE, 256, meta)
    table_id = tables.id_of(SCALED)
    spans = [Span([0] * count, 5, [0], table_id, range(count)) for count in lengths]
    batch = build_batch(spans, PAGE_SIZE, meta)
    query_1HTD, key_1KTD = (
        torch.empty(1, count, sum(lengths), 16, device=meta) for count in (4, 2)
    )
    call = AttentionCall(query_1HTD, key_1KTD, key_1KTD, 0.25, None, None, None)
    asked_1HTD = RotatedStep(batch, tables.layer("all"), Nowhere()).attend(0, call)
    assert asked_1HTD.shape == query_1HTD.shape


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_the_kernel_turns_as_the_formula_does(heads: tuple[int, int]) -> None:
    """Queries and keys have strides of their own."""
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    from benchmarks.gpu_rotation import turned

    joined = torch.randn(7, sum(heads), 2, 20, device=DEVICE)
    query_THD, key_TKD = joined[:, :, 1].split(heads, dim=1)
    angle_TP = torch.rand(7, 10, device=DEVICE) * 6
    angles = Angles(1.3 * angle_TP.cos(), 1.3 * angle_TP.sin())
    per_head = Angles(angles.cos[:, None], angles.sin[:, None])
    for got, given in zip(turned(query_THD, key_TKD, angles), (query_THD, key_TKD), strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, rotate(given, per_head))
