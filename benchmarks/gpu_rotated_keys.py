"""Model runners that show the cost of rotation at the read: caches whose read does not rotate.

`RotatedAtWrite` is the conventional cache. It rotates queries and keys by the step's angles before
the cache receives them, and keys stay as they were written. `NotRotated` rotates nothing. Its
answers are those of another model, and its time is a lower bound for every cache.

Both read with the server's kernel and a layer that does not rotate. Angles are computed once a
step, on the device. Nothing is copied to the host, so a CUDA graph can capture a step.

The heads of the model must rotate whole, in half-split pairs, without log-n.

Shapes: T = flat tokens of a step, S = sequences in it, P = rotated pairs, H = query heads, K = key
heads, D = head dimensions, V = value dimensions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.paged_attention import (
    AttentionCall,
    LayerPlan,
    PagedStep,
    StateCall,
)
from ropewalk.model_runtime.attention.rope_tables import LayerTables
from ropewalk.model_runtime.layers.last_layer import WritingStep
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope.angles import Angles, rotate


class NotRotated(ModelRunner):
    """A model runner that rotates neither queries nor keys. One thread at a time."""

    def _step(self, batch: Batch) -> WritingStep:
        return PagedStep(batch, self._store, self._tables, self._plain_plans, self._backend)

    @cached_property
    def _plain_plans(self) -> Mapping[int, LayerPlan]:
        return {index: replace(plan, layer_type=None) for index, plan in self._plans.items()}


class RotatedAtWrite(NotRotated):
    """A model runner whose cache holds rotated keys. One thread at a time."""

    def _step(self, batch: Batch) -> WritingStep:
        return RotatedStep(batch, self._rotating, super()._step(batch))

    @property
    def _rotating(self) -> LayerTables:
        tables = self._tables.layer(self._layer_type)
        if any(tables.logn_len):
            raise ValueError("log-n is not measured here")
        return tables

    @cached_property
    def _layer_type(self) -> str:
        """Return the type that all layers share. Raises ValueError for other models."""
        (plan,) = set(self._plans.values())
        if plan.layer_type is None or not plan.has_cache_order or plan.rotary_dim != plan.key_dim:
            raise ValueError(f"not a model that rotates whole heads in half-split pairs: {plan}")
        return plan.layer_type


@dataclass(slots=True)
class RotatedStep:
    """A step that rotates queries and keys, and passes them to a step that does not."""

    batch: Batch
    tables: LayerTables
    read: WritingStep
    _angles_TP: Angles | None = None

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Return the result of a layer with states, which rotates nothing."""
        return self.read.advance(layer_idx, call)

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the attention's output, [1, T, H, V]."""
        return self.read.attend(layer_idx, self._turned(call))

    def write(self, layer_idx: int, call: AttentionCall) -> None:
        self.read.write(layer_idx, self._turned(call))

    def _turned(self, call: AttentionCall) -> AttentionCall:
        if self._angles_TP is None:
            self._angles_TP = _angles(self.tables, self.batch)
        query_1HTD, key_1KTD = _turned(call.query_1HTD, call.key_1KTD, self._angles_TP)
        return replace(call, query_1HTD=query_1HTD, key_1KTD=key_1KTD)


def _angles(tables: LayerTables, batch: Batch) -> Angles:
    """Return cosines and sines of every token, [T, P], times the attention factor."""
    tensors = tables.device_tensors
    start_cos, start_sin, offset_cos, offset_sin = tensors.pages
    position_T = batch.position_ids_1T[0]
    table_T = batch.table_id_S
    if len(table_T) != len(position_T):
        lengths_S = batch.cu_seqlens_S1.diff()
        # With the size given, torch does not wait for the device to count.
        table_T = table_T.repeat_interleave(lengths_S, output_size=len(position_T))
    page_size = offset_cos.shape[1]
    page_T, offset_T = position_T // page_size, position_T % page_size
    angles = Angles(start_cos[table_T, page_T], start_sin[table_T, page_T]).plus(
        Angles(offset_cos[table_T, offset_T], offset_sin[table_T, offset_T])
    )
    factor_T1 = tensors.squared_factor_S[table_T].sqrt()[:, None]
    return Angles(angles.cos * factor_T1, angles.sin * factor_T1)


def _turned(query_1HTD: Tensor, key_1KTD: Tensor, angles_TP: Angles) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, in their own dtype; on a GPU one kernel does both."""
    query_THD, key_TKD = query_1HTD[0].transpose(0, 1), key_1KTD[0].transpose(0, 1)
    if query_THD.is_cuda:
        from benchmarks.gpu_rotation import turned  # noqa: PLC0415  # triton is optional

        query_THD, key_TKD = turned(query_THD, key_TKD, angles_TP)
    else:
        angles_T1P = Angles(angles_TP.cos[:, None], angles_TP.sin[:, None])
        query_THD, key_TKD = (
            rotate(each.float(), angles_T1P).to(each.dtype) for each in (query_THD, key_TKD)
        )
    return query_THD.transpose(0, 1)[None], key_TKD.transpose(0, 1)[None]


KINDS: Mapping[str, type[ModelRunner]] = {
    "read": ModelRunner,
    "write": RotatedAtWrite,
    "none": NotRotated,
}
