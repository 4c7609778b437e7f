"""One forward pass: spans of tokens in, rows of logits out.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
import torch
from torch import Tensor, nn

from model_runtime.attention.backends import backend_for
from model_runtime.attention.paged_attention import STEP, LayerPlan, PagedStep, Step
from model_runtime.batch import Batch, Span, build_batch
from model_runtime.cache.kv_cache import KVCache
from model_runtime.cache.rope_tables import RopeTables
from model_runtime.layers.last_layer import (
    AskedStep,
    WritingStep,
    asked_rows,
    asked_spans,
    trimmed_layer,
)
from model_runtime.runner.cuda_graphs import DecodeGraphs, Recorder
from model_runtime.runner.step_timer import StepTimer
from rope import Profile

_log = structlog.get_logger(__name__)


class ModelRunner:
    """Runs a taken-over model over the paged cache. One thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        plans: Mapping[int, LayerPlan],
        store: KVCache,
        tables: RopeTables,
        page_size: int,
    ) -> None:
        self._model = model
        self._plans = plans
        self._store = store
        self._tables = tables
        self._page_size = page_size
        self._device = next(model.parameters()).device
        self._backend = backend_for(self._device)
        self._trimmed_layer = trimmed_layer(model)
        self._graphs: DecodeGraphs | None = None

    def table_slot(self, profile: Profile) -> int:
        """The slot of the rotation table that sequences of this profile are read under."""
        return self._tables.slot(profile)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], clock: StepTimer | None = None) -> Tensor:
        """One forward over all spans; float32 [R, V], rows in the order the spans ask for them.

        `clock`: switched to `forward` when the batch is built.
        """
        run = self._recorded(spans)
        if run is None:
            batch = build_batch(spans, self._page_size, self._device)
            run = partial(self._forward, batch, *self._asked_step(spans, batch))
        if clock is not None:
            clock.switch("forward")
        return run()

    def _recorded(self, spans: Sequence[Span]) -> Callable[[], Tensor] | None:
        """A recorded step, ready to run; None where there is none for these spans."""
        if self._graphs is None or not self._graphs.takes(spans):
            return None
        try:
            return self._graphs.prepared(spans)
        except torch.OutOfMemoryError:  # with a request less it may work
            raise
        except RuntimeError as error:
            self._give_up_recording(error)
            return None

    def _give_up_recording(self, error: RuntimeError) -> None:
        """The forward asks the device for something: its kernels are queued one by one."""
        self._graphs = None
        _log.warning("decode_not_recorded", error=str(error), remedy="enforce_eager skips this")

    @torch.inference_mode()
    def capture_graphs(
        self, max_len: int, max_num_seqs: int, spare_page: int, record: Recorder
    ) -> None:
        """Record decode steps of up to `max_num_seqs` sequences; they are replayed from now on.

        Takes seconds. What cannot be recorded is queued kernel by kernel, as without.
        """
        began = time.monotonic()
        graphs = DecodeGraphs(
            self._single_tokens,
            self._tables,
            record,
            page_size=self._page_size,
            max_len=max_len,
            max_num_seqs=max_num_seqs,
            spare_page=spare_page,
        )
        try:
            num_recorded = graphs.record_all()
        except RuntimeError as error:  # or memory is full
            self._give_up_recording(error)
            return
        self._graphs = graphs
        seconds = round(time.monotonic() - began, 1)
        _log.info("decode_recorded", sizes=num_recorded, seconds=seconds)

    def _single_tokens(self, batch: Batch) -> Tensor:
        """The forward of a decode step, which depends on nothing but the batch's tensors."""
        return self._forward(batch, self._step(batch), batch.logit_rows_R)

    def _forward(self, batch: Batch, step: Step, logit_rows_R: Tensor) -> Tensor:
        answer = self._model(
            input_ids=batch.token_ids_1T,
            position_ids=batch.position_ids_1T,
            use_cache=False,
            logits_to_keep=logit_rows_R,
            **{STEP: step},
        )
        logits_RV: Tensor = answer.logits[0].float()
        return logits_RV

    def _asked_step(self, spans: Sequence[Span], batch: Batch) -> tuple[Step, Tensor]:
        """What answers the layers' calls, and the rows of logits among those that it leaves."""
        every = self._step(batch)
        asked = None if self._trimmed_layer is None else asked_spans(spans)
        if self._trimmed_layer is None or asked is None:
            return every, batch.logit_rows_R
        small = build_batch(asked, self._page_size, self._device)
        step = AskedStep(every, self._step(small), asked_rows(batch), self._trimmed_layer)
        return step, small.logit_rows_R

    def _step(self, batch: Batch) -> WritingStep:
        """What answers the attention layers' calls in a forward over a batch."""
        return PagedStep(batch, self._store, self._tables, self._plans, self._backend)
