"""CUDA graphs of small steps, captured once for each number of rows and then replayed.

A step whose rows are single tokens runs the same kernels on different inputs. For a small step, the
host needs longer to queue these kernels one by one than the GPU needs to run them. A captured step
(a CUDA graph) is queued by one call. Its inputs are at fixed addresses, which are filled before a
replay. A batch between two captured sizes is padded: each padding row is a token at position 0 of a
page that no sequence holds.

A row is the next token of a sequence, one of its draft, or a token of a short prompt. Each has a
page table and a position of its own, so a step of S rows serves any sequences, drafts and prompts
of so many rows. All keys of a step are written before any are read, so a row sees those of the
rows before it. Successive rows of a sequence read its keys together, but few at a time
(work_list.py). So long prompts are not rows, and behind a long context only a few tokens are.

Shapes: S = captured rows, N = pages of the longest sequence, R = rows of logits, V = vocabulary,
F = fields of a sequence's token, U = first tokens that only the device has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import (
    NO_SLOT,
    Batch,
    PageTable,
    Place,
    Span,
    by_group,
    same_pages,
    single_rows,
    state_parts,
)
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.attention.state_store import DeviceParts
from ropewalk.model_runtime.attention.work_list import Rows, refill
from ropewalk.model_runtime.layers.last_layer import host_logits_indices
from ropewalk.model_runtime.transfer import fill

# Runs the work, which makes its work lists, then captures it. Returns the result tensor and a
# function that replays the work into it.
Recorder = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class RecordingError(RuntimeError):
    """A decode step cannot be captured; other errors of a step are not of this type."""


_FIELDS = 4  # of a sequence's token, before its pages by group of layers and its slots
MOST_RECORDED = 512  # rows
# Tokens of a prompt that are rows behind any context. They read it about as often as a gather of
# its keys, which reads and writes them, and the attention after it.
_FEW_TOKENS = 16
# That the rows of other prompts see together, each all those up to itself. Four rows of a Llama 3
# 8B read them together: 4 GB, or a millisecond of an H200.
_MOST_KEYS = 131_072


def recorded_sizes(max_rows: int, max_prompt_rows: int = 0) -> list[int]:
    """Return the captured numbers of rows, ascending; less than half of a larger step is padding.

    `max_rows`: of decodes. `max_prompt_rows`: of steps with prompts; they have fewer sizes, from 8
    rows on.
    """
    most = min(max_rows, MOST_RECORDED)
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, 256, 32)]
    sizes = [*(size for size in (*steps, *range(256, most, 64)) if size < most), most]
    most_of_prompts = min(max_prompt_rows, MOST_RECORDED)
    if most_of_prompts > most:
        steps = [8, 16, *range(32, 128, 32), *range(128, most_of_prompts, 64)]
        sizes += [*(size for size in steps if most < size < most_of_prompts), most_of_prompts]
    return sizes


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make a wait for the device raise RuntimeError within the block."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a function that captures CUDA graphs into one shared memory pool.

    The graphs can share the pool because only one runs at a time. The function raises RuntimeError
    for work that waits for the device, before the capture, because torch 2.11 does not recover from
    a failed capture. Other threads may call CUDA meanwhile: readers of a tier pin memory, and
    NCCL's watchdog asks for events.
    """
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with torch.cuda.device(device):
            current = torch.cuda.current_stream()
            aside.wait_stream(current)
            try:
                with torch.cuda.stream(aside):
                    work()  # warm-up: compiles kernels, builds tables and sets up libraries
                    with _no_waiting():
                        work()
            finally:  # its kernels may still read inputs that the caller now frees
                current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # The outer `stream` restores the current stream if the capture fails.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                result = work()
        return result, graph.replay

    return record


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A captured step of S rows."""

    # int64: token, position, offset, rotation table, pages of groups, slots to read and to write of
    # a model with states
    numbers_FS: Tensor
    batch: Batch  # views of these numbers and constants, the inputs of the kernels
    pages: PageTable  # the host's copy of the batch's page table
    logits_RV: Tensor  # float32, the output of a replay
    replay: Callable[[], None]
    generation: int  # of the rotation tables at capture; in another they are elsewhere


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """The steps that are captured. All ranks of a divided model must have the same."""

    max_len: int  # of a context
    max_rows: int  # of decodes, and rows of logits of any step
    spare_page: int  # that no sequence holds, for padding
    max_prompt_rows: int = 0  # of steps with prompts; 0: none are captured
    max_prompt_tokens: int = 0  # of steps with prompts that are no rows (prompt_graphs.py)


class DecodeGraphs:
    """The captured steps, which are replayed. Not thread-safe.

    `forward`: returns the logits [R, V] of a batch in any dtype, and never waits for the device.
    `num_groups`: of layers, with a page each.
    `has_states`: the model has layers with states. Padding reads zeros there, and writes nothing.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        tables: RopeTables,
        record: Recorder,
        limits: CaptureLimits,
        *,
        page_size: int,
        num_groups: int = 1,
        has_states: bool = False,
    ) -> None:
        self._num_groups = num_groups
        self._has_states = has_states
        slots = _FIELDS + num_groups
        self._slots = slice(slots, slots + 2 * has_states)  # the rows of slots to read and write
        self._num_fields = self._slots.stop
        self._forward = forward
        self._tables = tables
        self._page_size = page_size
        self._limits = limits
        self._record = record
        self._max_rows = min(limits.max_rows, MOST_RECORDED)
        self._sizes = recorded_sizes(limits.max_rows, limits.max_prompt_rows)
        self._recorded: dict[int, _Recorded] = {}
        self._logits_RV: Tensor | None = None  # of the last replay, made by the first capture
        # By size: the rows of logits that its captured step has, if they are not 0, 1, 2 and so on.
        self._logit_rows: dict[int, Sequence[int]] = {}

    def record_all(self) -> int:
        """Capture every size and return their number; the largest first, the others fit its memory.

        Without a rotation table nothing is captured now, and each size is captured at first use.
        """
        if self._tables.num_tables:
            for size in reversed(self._sizes):
                self._recorded[size] = self._new(size)
        return len(self._recorded)

    @property
    def logits_RV(self) -> Tensor | None:
        """Return where all captured steps write their logits; None before the first capture."""
        return self._logits_RV

    def takes(self, spans: Sequence[Span]) -> bool:
        """Return whether a captured step computes these spans."""
        if _are_decodes(spans):
            return len(spans) <= self._max_rows
        return (
            sum(len(span.token_ids) for span in spans)
            <= min(self._limits.max_prompt_rows, MOST_RECORDED)
            and sum(len(span.logit_rows) for span in spans) <= self._max_rows
            and sum(map(_keys_of_prompt, spans)) <= _MOST_KEYS
        )

    def prepared(
        self, spans: Sequence[Span], token_U: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Fill the inputs of a step, and return a function that runs it: float32 [R, V].

        `token_U`: the first tokens of the step on the device, int64; None: all are in the spans.
        The logits are those of all logit rows, in order. They are valid until the next step runs.
        There must be at least one span.
        An earlier step may still run. The inputs on the device are filled after it, in the order
        of the stream. Their source on the host is new each time (`fill`).
        """
        num_logits, logit_rows = len(spans), None
        if not _are_decodes(spans):
            num_logits = sum(len(span.logit_rows) for span in spans)
            logit_rows = host_logits_indices(spans)
            spans = single_rows(spans)
        size = next(size for size in self._sizes if size >= len(spans))
        recorded = self._recorded.get(size)
        if recorded is None or recorded.generation != self._tables.generation:
            recorded = self._recorded[size] = self._new(size)
        self._fill_logit_rows(size, recorded.batch.logit_rows_R, logit_rows)
        changed = recorded.pages.follow(spans)
        if changed is not None:
            try:
                fill_tables(recorded.batch, recorded.pages, *changed)
            except Exception:  # the device may lack these rows
                recorded.pages.forget()
                raise
        numbers_FS = self._numbers(spans, recorded.pages.pages_SN)
        fill(recorded.numbers_FS, numbers_FS)
        same_pages_S = np.zeros(size, dtype=bool)
        same_pages_S[: len(spans)] = same_pages(spans)
        refill(recorded.batch.work_lists, Rows(numbers_FS[1], numbers_FS[3], same_pages_S))
        if token_U is not None:
            recorded.numbers_FS[0, : len(token_U)].copy_(token_U)

        @torch.inference_mode()
        def run() -> Tensor:
            recorded.replay()
            return recorded.logits_RV[:num_logits]

        return run

    def _fill_logit_rows(self, size: int, rows_R: Tensor, wanted: Sequence[int] | None) -> None:
        """Send the rows that need logits, if this size had others before. None: 0, 1, 2 and so on.

        `rows_R`: where the captured step reads them.
        """
        if wanted == self._logit_rows.get(size):
            return
        numbers_R = np.arange(len(rows_R))
        numbers_R[: len(wanted or ())] = wanted or ()
        fill(rows_R, numbers_R)
        if wanted is None:
            del self._logit_rows[size]
        else:
            self._logit_rows[size] = wanted

    def in_one_place(self, logits_RV: Tensor) -> Tensor:
        """Copy logits to the one place that all captured steps write to, as float32."""
        if self._logits_RV is None:
            shape = self._max_rows, logits_RV.shape[1]
            self._logits_RV = logits_RV.new_empty(shape, dtype=torch.float32)
        return self._logits_RV[: len(logits_RV)].copy_(logits_RV)

    def _numbers(self, spans: Sequence[Span], pages_SN: np.ndarray) -> np.ndarray:
        """Return the inputs of a step except for its page table, int64 [F, S]."""
        num_there, size = len(spans), len(pages_SN)
        numbers_FS = np.zeros((self._num_fields, size), dtype=np.int64)
        tokens_S, positions_S, offsets_S, tables_S = numbers_FS[:_FIELDS]
        tokens_S[:num_there] = [span.token_ids[0] for span in spans]
        positions_S[:num_there] = [span.first_position for span in spans]
        tables_S[:num_there] = [span.table_id for span in spans]
        columns_S, offsets_S[:] = np.divmod(positions_S, self._page_size)
        columns_S *= self._num_groups
        for group in range(self._num_groups):
            numbers_FS[_FIELDS + group] = pages_SN[np.arange(size), columns_S + group]
        if self._has_states:
            slots_2S = numbers_FS[self._slots]
            slots_2S[:] = NO_SLOT
            slots_2S[:, :num_there] = state_parts((0, span.states) for span in spans)[:, 2:].T
        return numbers_FS

    def _new(self, size: int) -> _Recorded:
        """Capture a step of padding; the same kernels read longer sequences and other pages."""
        device = self._tables.device
        num_pages = -(-self._limits.max_len // self._page_size)
        num_groups = self._num_groups
        numbers_FS = torch.zeros(self._num_fields, size, dtype=torch.int64, device=device)
        page_GS = numbers_FS[_FIELDS : _FIELDS + num_groups]
        page_GS[:] = self._limits.spare_page
        page_table_GSN = torch.full(
            (num_groups, size, num_pages), self._limits.spare_page, dtype=torch.int32, device=device
        )
        token_ids_S, position_S, offset_S, table_S = numbers_FS[:_FIELDS]
        numbers_FS[self._slots] = NO_SLOT
        place_S = torch.arange(size + 1, device=device)
        num_logits = min(size, self._max_rows)
        parts = None
        if self._has_states:
            read_S, write_S = numbers_FS[self._slots]
            parts = DeviceParts(place_S[:size], place_S[1:], read_S, write_S, place_S, 1)
        batch = Batch(
            token_ids_1T=token_ids_S[None],
            position_ids_1T=position_S[None],
            page_T=page_GS[0],
            offset_T=offset_S,
            page_table_SN=page_table_GSN[0],
            cu_seqlens_S1=place_S,
            first_position_S=position_S,
            table_id_S=table_S,
            logit_rows_R=torch.arange(num_logits, device=device),
            single_B=place_S[:size],
            # Places of padding. The forward's work lists from them are filled before a replay.
            places_S=tuple(Place(index, 1, 0, 0) for index in range(size)),
            same_pages_S=(False,) * size,
            page_table_GSN=None if num_groups == 1 else page_table_GSN,
            page_GT=None if num_groups == 1 else page_GS,
            device_parts=parts,
        )
        pages = PageTable(size, num_pages * num_groups, self._limits.spare_page)
        logits_RV, replay = captured(self._record, lambda: self.in_one_place(self._forward(batch)))
        self._logit_rows.pop(size, None)
        return _Recorded(numbers_FS, batch, pages, logits_RV, replay, self._tables.generation)


def captured(record: Recorder, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture work as a `Recorder` does. Raises RecordingError or OutOfMemoryError."""
    try:
        return record(work)
    except torch.OutOfMemoryError:  # it may work with one request fewer
        raise
    except RuntimeError as error:
        raise RecordingError(f"{type(error).__name__}: {error}") from error


def fill_tables(batch: Batch, pages: PageTable, rows: slice, columns: slice) -> None:
    """Send the changed part of the page tables to the device."""
    tables_GSN = batch.page_table_GSN
    if tables_GSN is None:
        rows_RN = np.ascontiguousarray(pages.pages_SN[rows, columns])
        fill(batch.page_table_SN[rows, columns], rows_RN)
        return
    num_groups = len(tables_GSN)
    end = -(-columns.stop // num_groups)
    rows_RX = pages.pages_SN[rows, : end * num_groups]
    fill(tables_GSN[:, rows, :end], by_group(rows_RX, num_groups))


def _are_decodes(spans: Sequence[Span]) -> bool:
    return all(len(span.token_ids) == len(span.logit_rows) == 1 for span in spans)


def _keys_of_prompt(span: Span) -> int:
    """Return how many keys the tokens of a prompt see, each all up to itself; 0 if they are few."""
    num_tokens = len(span.token_ids)
    if num_tokens <= _FEW_TOKENS:
        return 0
    return num_tokens * span.first_position + num_tokens * (num_tokens + 1) // 2
