"""Decode steps of a GPU, recorded once for each number of sequences and then replayed.

A step in which every sequence has one token runs the same kernels over other numbers. Queueing
these kernels one by one takes the host longer than a small step takes the GPU; a recorded step (a
CUDA graph) is queued by one call. What it reads stands at fixed places in memory, which are filled
before a replay. Numbers of sequences in between are padded: the sequences that are not there have
one token at position 0 of a page that no sequence holds.

Shapes: S = sequences that were recorded, N = pages of the longest sequence, V = vocabulary,
F = fields of a sequence's token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runtime.batch import Batch, Place, Span, page_table
from model_runtime.cache.rope_tables import RopeTables
from model_runtime.transfer import fill

# Runs the work once; the second of what it returns runs it again, and the result is in the first.
Recorder = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


MOST_RECORDED = 256  # sequences; above it, launches no longer are what a step waits for


def recorded_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that are recorded, ascending; less than half of any is padding."""
    most = min(max_num_seqs, MOST_RECORDED)
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, most, 32)]
    return [*(size for size in steps if size < most), most]


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Waiting for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def cuda_recorder(device: torch.device) -> Recorder:
    """Records CUDA graphs, which share one pool of memory since only one runs at a time.

    Raises RuntimeError for work that waits for the device, before anything is recorded: torch 2.11
    does not recover from a recording that breaks off.
    """
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with torch.cuda.device(device):
            current = torch.cuda.current_stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                work()  # kernels are compiled, tables made and libraries set up by then
                with _no_waiting():
                    work()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # The outer one: a recording that breaks off leaves its own stream the current one.
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool=pool):
                result = work()
        return result, graph.replay

    return record


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step of S sequences."""

    numbers_FS: Tensor  # int64: token, position, page, offset, table slot
    batch: Batch  # views of these numbers, and what never changes: kernels read all of it
    logits_SV: Tensor  # float32, where a replay leaves them
    replay: Callable[[], None]
    num_slots: int  # rotation tables there were; with more, all of them are elsewhere


class DecodeGraphs:
    """Runs decode steps by replaying them. One thread at a time.

    `forward`: the model's logits [S, V] of a batch; asks the device for nothing.
    `spare_page`: a page that no sequence holds.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        tables: RopeTables,
        record: Recorder,
        *,
        page_size: int,
        max_len: int,
        max_num_seqs: int,
        spare_page: int,
    ) -> None:
        self._forward = forward
        self._tables = tables
        self._page_size = page_size
        self._max_len = max_len
        self._spare_page = spare_page
        self._record = record
        self._sizes = recorded_sizes(max_num_seqs)
        self._recorded: dict[int, _Recorded] = {}

    def record_all(self) -> int:
        """Record every size now, the largest first: the others fit into its memory. How many.

        Before there is a rotation table none can be, and each is when it is first needed.
        """
        if self._tables.num_slots:
            for size in reversed(self._sizes):
                self._recorded[size] = self._new(size)
        return len(self._recorded)

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether the step is one of those that are recorded."""
        return len(spans) <= self._sizes[-1] and all(
            len(span.token_ids) == len(span.logit_rows) == 1 for span in spans
        )

    def prepared(self, spans: Sequence[Span]) -> Callable[[], Tensor]:
        """Put a step's numbers in their places. What it returns runs it: float32 [S, V].

        The logits stand until the next step runs. At least one span.
        """
        size = next(size for size in self._sizes if size >= len(spans))
        recorded = self._recorded.get(size)
        if recorded is None or recorded.num_slots != self._tables.num_slots:
            recorded = self._recorded[size] = self._new(size)
        numbers_FS, page_table_SN = self._numbers(spans, size)
        fill(recorded.numbers_FS, numbers_FS)
        fill(recorded.batch.page_table_SN[:, : page_table_SN.shape[1]], page_table_SN)

        def run() -> Tensor:
            recorded.replay()
            return recorded.logits_SV[: len(spans)]

        return run

    def _numbers(self, spans: Sequence[Span], size: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [F, S] and int32 [S, pages in use]."""
        num_there = len(spans)
        numbers_FS = np.zeros((5, size), dtype=np.int64)
        tokens_S, positions_S, pages_S, offsets_S, slots_S = numbers_FS
        tokens_S[:num_there] = [span.token_ids[0] for span in spans]
        positions_S[:num_there] = [span.first_position for span in spans]
        slots_S[:num_there] = [span.table_slot for span in spans]
        columns_S, offsets_S[:] = np.divmod(positions_S, self._page_size)
        shape = size, int(columns_S.max()) + 1
        table_SN = page_table(spans, shape, padding=self._spare_page)
        pages_S[:] = table_SN[np.arange(size), columns_S]
        return numbers_FS, table_SN

    def _new(self, size: int) -> _Recorded:
        """Record a step of padding; what is longer or elsewhere is read by the same kernels."""
        device = self._tables.device
        num_pages = -(-self._max_len // self._page_size)
        numbers_FS = torch.zeros(5, size, dtype=torch.int64, device=device)
        numbers_FS[2] = self._spare_page
        page_table_SN = torch.full(
            (size, num_pages), self._spare_page, dtype=torch.int32, device=device
        )
        token_ids_S, position_S, page_S, offset_S, slot_S = numbers_FS
        place_S = torch.arange(size + 1, device=device)
        batch = Batch(
            token_ids_1T=token_ids_S[None],
            position_ids_1T=position_S[None],
            page_T=page_S,
            offset_T=offset_S,
            page_table_SN=page_table_SN,
            cu_seqlens_S1=place_S,
            first_position_S=position_S,
            table_slot_S=slot_S,
            logit_rows_R=place_S[:size],
            single_B=place_S[:size],
            # The host knows no positions here, only how long a context may be.
            places_S=tuple(Place(index, 1, self._max_len - 1, 0) for index in range(size)),
        )
        logits_SV, replay = self._record(lambda: self._forward(batch))
        return _Recorded(numbers_FS, batch, logits_SV, replay, self._tables.num_slots)
