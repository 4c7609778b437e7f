"""One forward pass: spans of tokens in, rows of logits out.

Shapes: R = rows of logits, V = vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from model_runtime.attention import STEP, LayerPlan, PagedStep, Step
from model_runtime.backends import backend_for
from model_runtime.batch import Batch, Span, build_batch
from model_runtime.decode_graphs import DecodeGraphs, Recorder
from model_runtime.kv_store import KVStore
from model_runtime.rope_tables import RopeTables
from model_runtime.step_clock import StepClock
from rope import Profile


class ModelRunner:
    """Runs a taken-over model over the paged cache. One thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        plans: Mapping[int, LayerPlan],
        store: KVStore,
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
        self._graphs: DecodeGraphs | None = None

    def table_slot(self, profile: Profile) -> int:
        """The slot of the rotation table that sequences of this profile are read under."""
        return self._tables.slot(profile)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], clock: StepClock | None = None) -> Tensor:
        """One forward over all spans; float32 [R, V], rows in the order the spans ask for them.

        `clock`: switched to `forward` when the batch is built.
        """
        recorded = self._graphs is not None and self._graphs.takes(spans)
        if self._graphs is not None and recorded:
            run = self._graphs.fill(spans)
        else:
            run = partial(self._forward, build_batch(spans, self._page_size, self._device))
        if clock is not None:
            clock.switch("forward")
        return run()

    @torch.inference_mode()
    def record_decodes(
        self, max_len: int, max_num_seqs: int, spare_page: int, record: Recorder
    ) -> None:
        """Record decode steps of up to `max_num_seqs` sequences; they are replayed from now on.

        What a model's forward may raise when it cannot be recorded is raised, and nothing changes.
        """
        graphs = DecodeGraphs(
            self._forward,
            self._tables,
            record,
            page_size=self._page_size,
            max_len=max_len,
            max_num_seqs=max_num_seqs,
            spare_page=spare_page,
        )
        graphs.record_all()
        self._graphs = graphs

    def _forward(self, batch: Batch) -> Tensor:
        answer = self._model(
            input_ids=batch.token_ids_1T,
            position_ids=batch.position_ids_1T,
            use_cache=False,
            logits_to_keep=batch.logit_rows_R,
            **{STEP: self._step(batch)},
        )
        logits_RV: Tensor = answer.logits[0].float()
        return logits_RV

    def _step(self, batch: Batch) -> Step:
        """What answers the attention layers' calls in one forward."""
        return PagedStep(batch, self._store, self._tables, self._plans, self._backend)
