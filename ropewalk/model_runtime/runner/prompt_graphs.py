"""CUDA graphs of whole steps with prompts, captured once for each number of tokens.

The launches of a step take longer than the GPU's work, unless its prompts have thousands of tokens.
A captured step reads lists at fixed addresses: of decodes (work_list.py) and of prompts with their
gathered keys (`PaddedPrompts`). They are filled before a replay, and all numbers of tokens share
them. Padding tokens are written to a page that no sequence holds. Padding in the lists ends its
programs at once.

The first replay of each number of tokens is compared with the queued step, whose logits are
returned. If they differ, then such steps are queued from then on.

Some steps are queued: with more tokens, prompts or keys than there is room for, and all steps while
a table has a position method. Models with states and divided models have no such captures. A
captured step computes its whole last layer.

Shapes: T = flat tokens, X = sequences, N = pages of the longest sequence, G = groups of layers,
R = rows of logits, V = vocabulary, F = fields of a token, U = first tokens that only the device
has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import structlog
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, PageTable, Place, Span, places_of
from ropewalk.model_runtime.attention.prompt_groups import MOST_KEYS, PaddedPrompts
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.attention.work_list import Rows, refill
from ropewalk.model_runtime.layers.last_layer import host_logits_indices
from ropewalk.model_runtime.runner.cuda_graphs import (
    MOST_RECORDED,
    CaptureLimits,
    Recorder,
    captured,
    fill_tables,
)
from ropewalk.model_runtime.transfer import fill

LEAST_TOKENS, MOST_TOKENS = 64, 2048  # of a captured step; launches of longer ones are hidden
MOST_PROMPTS = 64
# Prompts times tokens of a captured step. Flash attention starts that many programs, and most of
# them end at once.
_MOST_PROGRAMS = MOST_TOKENS * 16
_SIZES_PER_OCTAVE = 8  # so that less than an eighth of a step is padding
_FIELDS = 3  # of a token, before its pages by group of layers
# That logits may differ from those of the queued step, as a part of the largest one. Products of
# more rows may be summed in another order.
_ALLOWED = {torch.float32: 1e-3}
_ALLOWED_OTHERWISE = 5e-2

_log = structlog.get_logger(__name__)


def most_prompts(size: int) -> int:
    """Return the number of prompts that a captured step of so many tokens has room for."""
    return min(MOST_PROMPTS, _MOST_PROGRAMS // size)


def prompt_sizes(most_tokens: int) -> list[int]:
    """Return the captured numbers of tokens, ascending, up to `most_tokens`; 0: none."""
    sizes, size = [], LEAST_TOKENS
    while size <= min(most_tokens, MOST_TOKENS):
        sizes.append(size)
        size += (1 << (size.bit_length() - 1)) // _SIZES_PER_OCTAVE
    return sizes


@dataclass(slots=True)
class _Captured:
    """A captured step of T tokens."""

    logits_RV: Tensor  # float32, the output of a replay
    replay: Callable[[], None]
    generation: int  # of the rotation tables at capture
    is_proven: bool = False  # a replay had the logits of the queued step


class PromptGraphs:
    """The captured steps with prompts, which are replayed. Not thread-safe.

    `forward`: returns the logits [R, V] of a batch in any dtype, and never waits for the device.
    `in_one_place`: copies them to where all captured steps have theirs.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        in_one_place: Callable[[Tensor], Tensor],
        tables: RopeTables,
        record: Recorder,
        limits: CaptureLimits,
        *,
        page_size: int,
        num_groups: int = 1,
    ) -> None:
        self._forward, self._in_one_place = forward, in_one_place
        self._tables, self._record, self._limits = tables, record, limits
        self._page_size, self._num_groups = page_size, num_groups
        self._sizes = prompt_sizes(limits.max_prompt_tokens)
        self._captured: dict[int, _Captured] = {}
        self._dropped: set[int] = set()  # sizes whose logits differed
        self._number_type = torch.float32  # of the forward's logits
        self._most_sequences = min(limits.max_rows, MOST_RECORDED)
        self._most_keys = min(MOST_KEYS, MOST_PROMPTS * limits.max_len)
        num_pages = -(-limits.max_len // page_size)
        # The last sequence has no token, and stands for those that are not there.
        num_rows, most_tokens = self._most_sequences + 1, self._sizes[-1]
        self._pages = PageTable(num_rows, num_pages * num_groups, limits.spare_page)
        device = tables.device
        self._tokens_FT = torch.zeros(
            _FIELDS + num_groups, most_tokens, dtype=torch.int64, device=device
        )
        self._tokens_FT[_FIELDS:] = limits.spare_page
        self._rows_4X = torch.zeros(4, num_rows + 1, dtype=torch.int64, device=device)
        page_table_GXN = torch.full(
            (num_groups, num_rows, num_pages), limits.spare_page, dtype=torch.int32, device=device
        )
        starts_X, first_X, table_X, single_X = self._rows_4X
        single_X[:] = num_rows - 1
        page_GT = self._tokens_FT[_FIELDS:]
        self._batch = Batch(
            token_ids_1T=self._tokens_FT[:1],
            position_ids_1T=self._tokens_FT[1:2],
            page_T=page_GT[0],
            offset_T=self._tokens_FT[2],
            page_table_SN=page_table_GXN[0],
            cu_seqlens_S1=starts_X,
            first_position_S=first_X[:num_rows],
            table_id_S=table_X[:num_rows],
            logit_rows_R=torch.zeros(self._most_sequences, dtype=torch.int64, device=device),
            single_B=single_X[:num_rows],
            # Sequences without a token. The work lists of these are filled before a replay.
            places_S=(Place(0, 0, 0, 0),) * num_rows,
            same_pages_S=(False,) * num_rows,
            page_table_GSN=None if num_groups == 1 else page_table_GXN,
            page_GT=None if num_groups == 1 else page_GT,
            prompts=PaddedPrompts(most_tokens, MOST_PROMPTS, self._most_keys, num_pages, device),
        )

    def record_all(self) -> int:
        """Capture every number of tokens, the largest first, and return how many there are.

        Without a rotation table each is captured at first use. With a position method none is.
        """
        if self._tables.num_tables and not self._tables.has_methods:
            for size in reversed(self._sizes):
                self._captured[size] = self._new(size)
        return len(self._captured)

    def takes(self, spans: Sequence[Span]) -> bool:
        """Return whether a captured step computes these spans."""
        size = self._size(sum(len(span.token_ids) for span in spans))
        keys = [
            span.first_position + len(span.token_ids) for span in spans if len(span.token_ids) > 1
        ]
        return (
            size is not None
            and size not in self._dropped
            and 0 < len(keys) <= most_prompts(size)
            and sum(keys) <= self._most_keys
            and len(spans) <= self._most_sequences
            and sum(len(span.logit_rows) for span in spans) <= len(self._batch.logit_rows_R)
            and not self._tables.has_methods
        )

    def _size(self, num_tokens: int) -> int | None:
        """Return the captured number of tokens for a step; None if there is none."""
        return next((size for size in self._sizes if size >= num_tokens), None)

    def prepared(
        self,
        spans: Sequence[Span],
        queued: Callable[[], Callable[[], Tensor]],
        token_U: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Fill the inputs of a step, and return a function that runs it: float32 [R, V].

        `queued`: prepares the same step without a capture. `token_U`: as for `DecodeGraphs`, whose
        logits are valid as long.
        """
        num_tokens = sum(len(span.token_ids) for span in spans)
        size = self._size(num_tokens)
        assert size is not None, "a step that is not taken"
        self._fill(spans)
        step = self._captured.get(size)
        if step is None or step.generation != self._tables.generation:
            # The capture runs this step. It must not write to pages of an earlier one.
            step = self._captured[size] = self._new(size)
            self._fill(spans)  # lists that it has made
        if token_U is not None:
            self._tokens_FT[0, : len(token_U)].copy_(token_U)
        num_logits = sum(len(span.logit_rows) for span in spans)

        @torch.inference_mode()
        def run() -> Tensor:
            step.replay()
            return step.logits_RV[:num_logits]

        if step.is_proven:
            return run
        otherwise = queued()

        def compare() -> Tensor:
            # The queued step is last, so the cache has its keys and values.
            found_RV, expected_RV = run(), otherwise()
            if num_logits:
                self._judge(size, step, found_RV, expected_RV)
            return expected_RV

        return compare

    def _judge(self, size: int, step: _Captured, found_RV: Tensor, expected_RV: Tensor) -> None:
        """Keep a captured step whose logits are those of the queued one, and drop another."""
        allowed = _ALLOWED.get(self._number_type, _ALLOWED_OTHERWISE)
        difference = float((found_RV - expected_RV).abs().max())
        if difference <= allowed * float(expected_RV.abs().max()):  # NaN is not
            step.is_proven = True
            return
        self._dropped.add(size)
        del self._captured[size]
        _log.warning("prompt_step_dropped", tokens=size, difference=round(difference, 4))

    def _fill(self, spans: Sequence[Span]) -> None:
        """Send the inputs of a step."""
        changed = self._pages.follow(spans)
        if changed is not None:
            try:
                fill_tables(self._batch, self._pages, *changed)
            except Exception:  # the device may lack these rows
                self._pages.forget()
                raise
        places = places_of(spans)
        begin_S, count_S, first_S, table_S = np.array(places).T
        num_there, num_tokens = len(places), int(count_S.sum())
        row_T, flat_T = np.repeat(np.arange(num_there), count_S), np.arange(num_tokens)
        tokens_FT = np.zeros(self._tokens_FT.shape, dtype=np.int64)
        tokens_FT[_FIELDS:] = self._limits.spare_page
        tokens = chain.from_iterable(span.token_ids for span in spans)
        tokens_FT[0, :num_tokens] = np.fromiter(tokens, np.int64, num_tokens)
        tokens_FT[1, :num_tokens] = flat_T + (first_S - begin_S)[row_T]
        column_T, tokens_FT[2] = np.divmod(tokens_FT[1], self._page_size)
        rows_4X = np.zeros(self._rows_4X.shape, dtype=np.int64)
        rows_4X[:3, :num_there] = begin_S, first_S, table_S
        for group in range(self._num_groups):
            column = column_T[:num_tokens] * self._num_groups + group
            tokens_FT[_FIELDS + group, :num_tokens] = self._pages.pages_SN[row_T, column]
        single_B = np.flatnonzero(count_S == 1)
        rows_4X[3] = self._most_sequences
        rows_4X[3, : len(single_B)] = single_B
        fill(self._tokens_FT, tokens_FT)
        fill(self._rows_4X, rows_4X)
        position_X = np.full(self._most_sequences + 1, -1, dtype=np.int64)
        position_X[single_B] = rows_4X[1, single_B]
        # The decodes here have no drafts, so no two rows share pages.
        rows = Rows(position_X, rows_4X[2, : len(position_X)], np.zeros_like(position_X, bool))
        refill(self._batch.work_lists, rows)
        assert self._batch.prompts is not None
        self._batch.prompts.refill(
            [(index, places[index]) for index in np.flatnonzero(count_S > 1).tolist()]
        )
        rows_R = np.zeros(len(self._batch.logit_rows_R), dtype=np.int64)
        wanted = host_logits_indices(spans)
        rows_R[: len(wanted)] = wanted
        fill(self._batch.logit_rows_R, rows_R)

    def _new(self, size: int) -> _Captured:
        """Capture a step of padding; the same kernels read other tokens, prompts and pages."""
        whole = self._batch
        assert whole.prompts is not None
        batch = replace(
            whole,
            token_ids_1T=whole.token_ids_1T[:, :size],
            position_ids_1T=whole.position_ids_1T[:, :size],
            page_T=whole.page_T[:size],
            offset_T=whole.offset_T[:size],
            page_GT=None if whole.page_GT is None else whole.page_GT[:, :size],
            logit_rows_R=whole.logit_rows_R[:size],
            prompts=whole.prompts.of_size(size, most_prompts(size)),
        )

        def work() -> Tensor:
            logits_RV = self._forward(batch)
            self._number_type = logits_RV.dtype
            return self._in_one_place(logits_RV)

        return _Captured(*captured(self._record, work), self._tables.generation)
