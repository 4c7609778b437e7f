"""Means and covariances of every head's queries and keys, unrotated, over a sample text.

They are taken at the attention call in the model's own forward, so after its norms and biases. This
holds for every served architecture.

Shapes: T = tokens, H = query heads, K = key heads, D = key dimensions, X = either kind of head.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    AttentionCall,
    LayerPlan,
    PagedContext,
    StateCall,
)
from ropewalk.model_runtime.attention.quantised.page_format import EXACT
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.backends import backend_for, new_store, state_store
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope.decay import Moments
from ropewalk.rope.tiers import build_tiers
from ropewalk.studies.inspection.layer_statistics import LayerStatistics

_PAGE_SIZE = 16


class _Sums:
    """Sums over tokens in float64 on the CPU; sums of squares lose digits in smaller types."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sum_XD = torch.zeros(())
        self._squares_XDD = torch.zeros(())

    def add(self, x_XTD: Tensor) -> None:
        x_XTD = x_XTD.to("cpu", torch.float64)
        self._num_tokens += x_XTD.shape[1]
        self._sum_XD = self._sum_XD + x_XTD.sum(1)
        self._squares_XDD = self._squares_XDD + x_XTD.transpose(1, 2) @ x_XTD

    def moments(self) -> Moments:
        mean_XD = self._sum_XD / self._num_tokens
        outer_XDD = mean_XD[:, :, None] * mean_XD[:, None, :]
        return Moments(mean_XD, self._squares_XDD / self._num_tokens - outer_XDD)


class _Watch:
    """A step that adds up each layer's queries and keys, and calls an inner step."""

    def __init__(self, plans: Mapping[int, LayerPlan], layers: Collection[int]) -> None:
        self._plans = plans
        self._query = {index: _Sums() for index in layers}
        self._key = {index: _Sums() for index in layers}
        self._calls: dict[int, AttentionCall] = {}
        self.inner: PagedContext | None = None

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Return the inner step's result of a layer with states."""
        assert self.inner is not None
        return self.inner.advance(layer_idx, call)

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Add up the selected layers' queries and keys, and return the inner step's output."""
        if layer_idx in self._query:
            plan = self._plans[layer_idx]
            query_HTD = plan.in_cache_order(call.query_1HTD[0])
            key_KTD = plan.in_cache_order(call.key_1KTD[0])
            self._query[layer_idx].add(query_HTD)
            self._key[layer_idx].add(key_KTD)
            self._calls[layer_idx] = call
        assert self.inner is not None
        return self.inner.attend(layer_idx, call)

    def statistics(self) -> dict[int, LayerStatistics]:
        """Return the statistics of all tokens so far. Raises ModelError for NaN and Inf."""
        found = {}
        for index, call in sorted(self._calls.items()):
            layer = LayerStatistics(
                self._query[index].moments(),
                self._key[index].moments(),
                self._plans[index],
                call.scaling,
                call.sliding_window,
            )
            for name, moments in (("queries", layer.query), ("keys", layer.key)):
                if not bool(moments.covariance_HDD.isfinite().all()):
                    raise ModelError(f"layer {index}: {name} of the sample text have NaN or Inf")
            found[index] = layer
        return found


def sequence_len(checkpoint: Checkpoint, at_most: int) -> int:
    """Return the tokens of a sequence that the checkpoint's native table serves."""
    native = checkpoint.native.trained
    return min(at_most, build_tiers(native.method, native)[0].ceiling)


@torch.inference_mode()
def head_statistics(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], layers: Collection[int]
) -> dict[int, LayerStatistics]:
    """Run the sequences one by one under the native table; return statistics by layer index.

    Every token has the same weight. The caller ensures that each sequence has 1 to `sequence_len`
    tokens and begins at position 0. Raises ModelError if queries or keys are not finite.
    """
    native, device, plans = checkpoint.native.trained, checkpoint.device, checkpoint.plans
    longest = max(map(len, sequences))
    pages = range(-(-longest // _PAGE_SIZE))
    store = new_store(checkpoint.cache_layout(_PAGE_SIZE, EXACT), len(pages), device)
    tables = RopeTables(native, _PAGE_SIZE, longest, device)
    slot = tables.id_of(build_tiers(native.method, native)[0].profile)
    states = state_store(checkpoint.states, 1, device)
    watch = _Watch(plans, layers)
    for token_ids in sequences:
        parts = [StatePart(len(token_ids), None, 0)] if checkpoint.states else ()
        span = Span(token_ids, 0, pages, slot, [len(token_ids) - 1], parts)
        batch = build_batch([span], _PAGE_SIZE, device)
        watch.inner = PagedContext(batch, store, tables, plans, backend_for(device), states=states)
        checkpoint.model(
            input_ids=batch.token_ids_1T,
            position_ids=batch.position_ids_1T,
            use_cache=False,
            logits_to_keep=batch.logit_rows_R,
            **{STEP: watch},
        )
    return watch.statistics()
