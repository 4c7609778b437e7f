"""Stale rotated keys, as in engines that cache keys after rotation; for comparison only.

A key is rotated once, when it is written, with the current table of its sequence. It keeps that
rotation and that attention factor. Queries use the current table. After a tier change, the angle
between a query and an old key is therefore no longer that of their distance. No code that serves
requests imports this file.

It uses the same pages, kernels and scheduler as serving. Keys and queries are rotated before they
reach the cache, and the cache reads them like a layer without rotary embeddings.

Shapes: T = flat tokens of a step, S = sequences in it, P = rotated pairs, H = heads,
D = head dimensions, V = value dimensions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.paged_attention import (
    AttentionCall,
    LayerPlan,
    PagedStep,
    StateCall,
)
from ropewalk.model_runtime.attention.rope_tables import LayerTables, RopeTables
from ropewalk.model_runtime.layers.last_layer import WritingStep
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope.angles import Angles, rotate


class StaleKeyRunner(ModelRunner):
    """A model runner with rotated keys in its cache. One thread at a time."""

    def _step(self, batch: Batch) -> WritingStep:
        """Return a step that rotates at the write and not at the read."""
        plans = {
            layer_idx: replace(plan, layer_type=None, interleaved=False, rotary_start=0)
            for layer_idx, plan in self._plans.items()
        }
        states = self._states
        read = PagedStep(batch, self._store, self._tables, plans, self._backend, states=states)
        return StaleKeyStep(batch, self._tables, self._plans, read)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The rotation of the step's tokens in one type of layer."""

    angles_T1P: Angles
    factor_T11: Tensor  # the attention factor, on keys and on queries
    query_scale_T11: Tensor  # of the log-n switch


@dataclass(frozen=True, slots=True)
class StaleKeyStep:
    """A step that rotates queries and keys by current tables before a step without rotation."""

    batch: Batch
    tables: RopeTables
    plans: Mapping[int, LayerPlan]
    read: PagedStep  # over plans without rotation
    _turns: dict[str, _Turn] = field(default_factory=dict)  # by layer type; made once a step

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Return the result of a layer with states, which rotates nothing."""
        return self.read.advance(layer_idx, call)

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the attention's output, [1, T, H, V]."""
        return self.read.attend(layer_idx, self._rotated(layer_idx, call))

    def write(self, layer_idx: int, call: AttentionCall) -> None:
        self.read.write(layer_idx, self._rotated(layer_idx, call))

    def _rotated(self, layer_idx: int, call: AttentionCall) -> AttentionCall:
        plan = self.plans[layer_idx]
        if plan.layer_type is None:
            return call
        if plan.layer_type not in self._turns:
            self._turns[plan.layer_type] = _turn(self.tables.layer(plan.layer_type), self.batch)
        turn = self._turns[plan.layer_type]
        query_1HTD = _rotated(call.query_1HTD, plan, turn, turn.query_scale_T11)
        key_1KTD = _rotated(call.key_1KTD, plan, turn, torch.ones_like(turn.query_scale_T11))
        return replace(call, query_1HTD=query_1HTD, key_1KTD=key_1KTD)


def _turn(tables: LayerTables, batch: Batch) -> _Turn:
    """Compute the angles of every token of the step under its own sequence's table."""
    position_T = batch.position_ids_1T[0]
    table_T = batch.table_id_S.repeat_interleave(batch.cu_seqlens_S1.diff())
    cos_TP, sin_TP = torch.empty(2, len(position_T), tables.num_pairs, device=position_T.device)
    factor_T = torch.empty(len(position_T), device=position_T.device)
    scale_T = torch.empty(len(position_T), device=position_T.device)
    for table_id in set(table_T.tolist()):
        of_table_T = table_T == table_id
        angles = tables.at(table_id, position_T[of_table_T])
        cos_TP[of_table_T], sin_TP[of_table_T] = angles.cos[:, 0], angles.sin[:, 0]
        factor_T[of_table_T] = tables.attention_factor[table_id]
        scale_T[of_table_T] = tables.logn_scale(table_id, position_T[of_table_T])
    angles_T1P = Angles(cos_TP[:, None], sin_TP[:, None])
    return _Turn(angles_T1P, factor_T[:, None, None], scale_T[:, None, None])


def _rotated(x_1HTD: Tensor, plan: LayerPlan, turn: _Turn, scale_T11: Tensor) -> Tensor:
    """Return [1, H, T, D] rotated, in half-split order, in the input's dtype."""
    x_THD = plan.in_cache_order(x_1HTD[0].transpose(0, 1).float())
    x_THD = rotate(x_THD, turn.angles_T1P)
    num_rotated = 2 * turn.angles_T1P.cos.shape[-1]
    # The factor applies to cosines and sines, so dimensions without rotation do not have it.
    turned_THD = torch.cat(
        (x_THD[..., :num_rotated] * turn.factor_T11, x_THD[..., num_rotated:]), dim=-1
    )
    return (turned_THD * scale_T11).to(x_1HTD.dtype).transpose(0, 1)[None]
