"""One forward pass: spans of tokens in, rows of logits out.

Shapes: R = rows of logits, V = vocabulary, U = first tokens that only the device has.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Batch, Span, build_batch, state_parts
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    AttentionContext,
    Backend,
    LayerPlan,
    PagedContext,
    SlotStore,
    StateCall,
)
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.attention.state_store import StateStore
from ropewalk.model_runtime.config import MOST_DRAFT_ROWS
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu_nodes import has_gpu_kernels
from ropewalk.model_runtime.layers.last_layer import (
    PrunedContext,
    host_logits_indices,
    logits_indices,
    pruned_spans,
    prunes,
)
from ropewalk.model_runtime.runner.backends import backend_for, has_cpu_kernels
from ropewalk.model_runtime.runner.cuda_graphs import (
    CaptureLimits,
    DecodeGraphs,
    Recorder,
    RecordingError,
    recorded_sizes,
)
from ropewalk.model_runtime.runner.launched_step import HostBuffers, LaunchedStep
from ropewalk.model_runtime.runner.prompt_graphs import PromptGraphs, prompt_sizes
from ropewalk.model_runtime.runner.sampler import SamplingRow, sampled_on_device
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

if TYPE_CHECKING:
    from ropewalk.model_runtime.runner.captured_draws import CapturedDraws


_log = structlog.get_logger(__name__)


class ModelRunner:
    """The forward pass of a patched model over the paged cache. Not thread-safe."""

    def __init__(
        self,
        model: nn.Module,
        plans: Mapping[int, LayerPlan],
        store: KVCache,
        tables: RopeTables,
        page_size: int,
        *,
        backend: type[Backend] | None = None,
        states: SlotStore | None = None,
        is_one_of_ranks: bool = False,
    ) -> None:
        """Keep what a step needs. `backend`: None means the one that serves the device.

        `states`: the slots of a model with states. `is_one_of_ranks`: others compute the same
        steps, and may wait in a gather of one that fails here.
        """
        self._is_one_of_ranks = is_one_of_ranks
        self._states = states
        self._state_calls: Mapping[int, StateCall] | None = None  # of the last step, with drafts
        self._model = model
        self._plans = plans
        self._store = store
        self._tables = tables
        self._page_size = page_size
        self._device = next(model.parameters()).device
        self._backend = backend or store.own_backend() or backend_for(self._device)
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._draws: CapturedDraws | None = None  # from the logits of captured steps
        self._host_buffers = HostBuffers()

    @property
    def store(self) -> KVCache:
        return self._store

    def table_id(self, profile: Profile) -> int:
        return self._tables.id_of(profile)

    @property
    def most_draft_rows(self) -> int:
        """Return the most rows of a decode step with drafts.

        The CPU's kernels give a row the same bits among so many rows.
        """
        if not has_cpu_kernels(self._device):
            return MOST_DRAFT_ROWS
        from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (  # noqa: PLC0415  # imports numba
            MOST_ROWS,
        )

        return MOST_ROWS

    @property
    def is_asynchronous(self) -> bool:
        """Return whether `launch` returns before the device has run the step."""
        return self._device.type == "cuda"

    @property
    def is_captured(self) -> bool:
        """Return whether small steps are replayed, so no forward of the model waits for it."""
        return self._graphs is not None

    @torch.inference_mode()
    def prepare(self, spans: Sequence[Span], token_U: Tensor | None = None) -> Callable[[], Tensor]:
        """Build the batch of these spans, and return its forward.

        The forward returns float32 logits [R, V] in the order of the spans' logit rows.
        `token_U`: the first tokens of the step on the device, int64; None: all are in the spans.
        """
        forward = self._recorded(spans, token_U)
        return self._queued(spans, token_U) if forward is None else forward

    def _queued(self, spans: Sequence[Span], token_U: Tensor | None) -> Callable[[], Tensor]:
        """Build the batch of these spans, and return its forward, whose kernels are queued."""
        batch = self._store.with_own_pages(
            build_batch(spans, self._page_size, self._device, self._store.num_groups), spans
        )
        if token_U is not None:
            batch.token_ids_1T[0, : len(token_U)].copy_(token_U)
        return partial(self._forward, batch, *self._pruned_context(spans, batch))

    def check_device(self) -> None:
        """Wait for the device. Raises if it no longer works."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def launch(
        self,
        spans: Sequence[Span],
        rows: Sequence[SamplingRow],
        before: tuple[LaunchedStep, Sequence[int]] | None,
    ) -> LaunchedStep:
        """Queue a step with its sampling from all rows of logits, without a wait for the device.

        `before`: the step whose tokens are the first inputs of this one, and the row in it of each
        of the first spans, which are decodes; None: all tokens are in the spans.
        """
        token_U = None if before is None else before[0].tokens_at(before[1])
        logits_RV = self.prepare(spans, token_U)()
        told_A = None if self._draws is None else self._draws.draw(logits_RV, rows)
        if told_A is None:
            told_A = sampled_on_device(logits_RV, logits_RV, rows)
        return LaunchedStep(told_A, self._host_buffers)

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Run one forward over all spans; return float32 [R, V] in the order of their rows."""
        return self.prepare(spans)()

    @torch.inference_mode()
    def advance_states(self, parts: Iterable[tuple[int, Sequence[StatePart]]]) -> None:
        """Advance states by tokens of the last step's drafts, whose inputs were kept.

        `parts`: for each sequence, the token's place in the flat row of the step, and the parts.
        The bits are those of a step that computes the tokens anew.
        """
        states, calls = self._states, self._state_calls
        assert states is not None, "a model without states"
        assert calls is not None, "the last step had no drafts"
        assert isinstance(states, StateStore), "drafts beside states are for a CPU"
        parts_X4 = state_parts(parts)
        for layer_idx, call in calls.items():
            call.advance(states.layer(layer_idx), parts_X4)

    def _recorded(
        self, spans: Sequence[Span], token_U: Tensor | None
    ) -> Callable[[], Tensor] | None:
        """Return a captured step, ready to run; None if there is none for these spans."""
        try:
            if self._graphs is not None and self._graphs.takes(spans):
                return self._graphs.prepared(spans, token_U)
        except RecordingError as error:
            self._give_up_recording(error)
            return None
        try:
            if self._prompt_graphs is not None and self._prompt_graphs.takes(spans):
                queued = partial(self._queued, spans, token_U)
                return self._prompt_graphs.prepared(spans, queued, token_U)
        except RecordingError as error:
            self._prompt_graphs = None
            _log.warning("prompts_not_recorded", error=str(error))
        return None

    def _give_up_recording(self, error: RuntimeError) -> None:
        """Disable graphs after a failed capture; kernels are then queued one by one."""
        self._graphs = self._prompt_graphs = self._draws = None
        _log.warning("decode_not_recorded", error=str(error), remedy="enforce_eager skips this")

    @torch.inference_mode()
    def capture_graphs(self, limits: CaptureLimits, record: Recorder) -> None:
        """Capture small steps, and replay them from now on.

        Takes seconds. If the capture fails, then kernels are queued one by one. Raises ModelError
        if memory runs out on one of several ranks, because only this rank would give up.
        """
        began = time.monotonic()
        graphs = DecodeGraphs(
            self._captured_step,
            self._tables,
            record,
            limits,
            page_size=self._page_size,
            num_groups=self._store.num_groups,
            has_states=self._states is not None,
        )
        prompts = None
        if prompt_sizes(limits.max_prompt_tokens):
            prompts = PromptGraphs(
                self._captured_step,
                graphs.in_one_place,
                self._tables,
                record,
                limits,
                page_size=self._page_size,
                num_groups=self._store.num_groups,
            )
        num_prompts = 0
        try:
            # Those with prompts need the most memory, which the others then share.
            num_prompts = 0 if prompts is None else prompts.record_all()
        except (RecordingError, torch.OutOfMemoryError) as error:
            prompts = None
            _log.warning("prompts_not_recorded", error=str(error))
        try:
            num_recorded = graphs.record_all()
            draws = self._captured_draws(graphs, limits.max_rows, record)
        except (RecordingError, torch.OutOfMemoryError) as error:
            if self._is_one_of_ranks and isinstance(error, torch.OutOfMemoryError):
                raise ModelError(
                    "memory ran out in a capture of decode steps; "
                    "lower gpu_memory_utilization, or set enforce_eager"
                ) from error
            self._give_up_recording(error)
            return
        self._graphs, self._prompt_graphs, self._draws = graphs, prompts, draws
        seconds = round(time.monotonic() - began, 1)
        _log.info("decode_recorded", sizes=num_recorded, prompt_sizes=num_prompts, seconds=seconds)

    def _captured_draws(
        self, graphs: DecodeGraphs, max_rows: int, record: Recorder
    ) -> "CapturedDraws | None":
        """Capture draws from the logits of captured steps; None on a device without kernels."""
        if graphs.logits_RV is None or not has_gpu_kernels(self._device):
            return None
        from ropewalk.model_runtime.runner.captured_draws import (  # noqa: PLC0415  # imports triton
            CapturedDraws,
        )

        return CapturedDraws(graphs.logits_RV, recorded_sizes(max_rows), record)

    def _captured_step(self, batch: Batch) -> Tensor:
        """Run the forward of a captured step, which depends only on the batch's tensors."""
        return self._logits(batch, self._context(batch), batch.logit_rows_R)

    def _forward(
        self, batch: Batch, context: AttentionContext | PrunedContext, logit_rows_R: Tensor
    ) -> Tensor:
        return self._logits(batch, context, logit_rows_R).float()

    @torch.inference_mode()
    def _logits(
        self, batch: Batch, context: AttentionContext | PrunedContext, logit_rows_R: Tensor
    ) -> Tensor:
        """Return the logits in the model's dtype."""
        answer = self._model(
            input_ids=batch.token_ids_1T,
            position_ids=batch.position_ids_1T,
            use_cache=False,
            logits_to_keep=logit_rows_R,
            **{STEP: context},
        )
        logits_RV: Tensor = answer.logits[0]
        if len(logits_RV) != len(logit_rows_R):  # the class has no `logits_to_keep`
            return logits_RV[logit_rows_R]
        return logits_RV

    def _pruned_context(
        self, spans: Sequence[Span], batch: Batch
    ) -> tuple[AttentionContext | PrunedContext, Tensor]:
        """Return the context of the layers' calls, and the logit rows among its remaining rows."""
        every = self._context(batch)
        takes_pruned = prunes(self._model, self._plans, self._backend)
        pruned = pruned_spans(spans) if takes_pruned else None
        if pruned is None:
            return every, batch.logit_rows_R
        small = build_batch(pruned, self._page_size, self._device, self._store.num_groups)
        rows_R = logits_indices(batch)
        if batch.own_pages is not None:
            small = replace(small, own_pages=batch.own_pages.at_rows(host_logits_indices(spans)))
        context = PrunedContext(every, self._context(small), rows_R)
        return context, small.logit_rows_R

    def _context(self, batch: Batch) -> PagedContext:
        states = self._states
        context = PagedContext(
            batch, self._store, self._tables, self._plans, self._backend, states=states
        )
        self._state_calls = context.state_calls
        return context
