"""A model's forward on a GPU, as a loop over launches.

The host's time of a step that is not captured is that of Python: a model's own forward has thirty
calls of modules in each layer, and makes a tensor for each result. Here a layer is ten launches
into one piece of memory.

Shapes: R = rows, C = columns of a value, H = heads, D = dimensions of a head, V = vocabulary,
M = numbers of all values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import structlog
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    AttentionCall,
    Backend,
    LayerPlan,
    PagedContext,
)
from ropewalk.model_runtime.gpu.launch import Launches
from ropewalk.model_runtime.gpu.primitives import scale_tensors
from ropewalk.model_runtime.gpu.program.launches import (
    Launch,
    Layout,
    Multiply,
    Run,
    launches_of,
    lay_out,
)
from ropewalk.model_runtime.gpu.program.trace import traced
from ropewalk.model_runtime.layers.last_layer import PrunedContext
from ropewalk.model_runtime.probing.probe import recorded_calls
from ropewalk.model_runtime.tracing.operations import Attend, Trace, UntraceableError

_log = structlog.get_logger(__name__)


class Logits(NamedTuple):
    """The result of a forward."""

    logits: Tensor  # [1, R, V]


def flat_forward(model: Any, plans: Mapping[int, LayerPlan]) -> "FlatForward | None":
    """Return this forward for a model; None if a part of it has no launch."""
    try:
        return FlatForward(model, traced(model, plans), plans)
    except UntraceableError as error:
        _log.info("forward_not_flat", model=type(model).__name__, reason=str(error))
        return None


class FlatForward:
    """A model's forward over a paged cache; other calls go to the model's own forward."""

    has_same_bits: ClassVar = False  # as the model's own forward

    def __init__(
        self,
        model: Any,
        trace: Trace,
        plans: Mapping[int, LayerPlan],
        multiply: Multiply | None = None,
    ) -> None:
        """Lay out the launches. `multiply`: makes those of linears; None: by torch."""
        self.own_forward = model.forward
        self._embed, self._tail, self._plans = model.get_input_embeddings(), trace.tail, plans
        assert trace.head is not None
        self._num_logits = trace.head.linears.out_features
        launches, self._widths = launches_of(trace, multiply)
        *self._launches, self._head = launches
        self._embedding = trace.embedding.number
        self._outside = {self._embedding} | {
            value
            for each in self._launches
            for value in each.writes
            if each.attends is not None or each.module is not None
        }
        self._layout = lay_out(launches, self._widths, self._outside)
        self._last = next(
            place
            for place, each in enumerate(self._launches)
            if each.attends is not None and each.attends.layer == max(plans)
        )
        self._kinds = self._kinds_of_attention()
        later = [run.value for each in launches[self._last :] for run in each.reads]
        written = {self._embedding} | {
            value for each in self._launches[: self._last] for value in each.writes
        }
        self._live_at_last = sorted(written & set(later))

    def takes_pruned(self, plans: Mapping[int, LayerPlan], backend: type[Backend]) -> bool:
        """Return whether rows can be cut after the last layer's write, in steps of a runner."""
        del backend
        return plans is self._plans

    def note_windows(self, model: Any) -> None:
        """Read the windows of all layers again, after they were changed in the model."""
        calls = recorded_calls(model)
        for each in self._launches:
            source = each.attends
            if source is not None:
                window = calls[source.layer].sliding_window
                each.attends = replace(source, call=replace(source.call, sliding_window=window))
        self._kinds = self._kinds_of_attention()

    def _kinds_of_attention(self) -> dict[int, tuple[Any, ...]]:
        """Return what decides a layer's launches, by its place; none of layers that stand alone.

        A layer's output has the memory of the layer before it of the same kind, so it must be read
        before the next attention.
        """
        last = {run.value: place for place, each in enumerate(self._launches) for run in each.reads}
        places = [place for place, each in enumerate(self._launches) if each.attends is not None]
        found = {}
        for place, following in zip(places, [*places[1:], len(self._launches)], strict=True):
            each = self._launches[place]
            source = each.attends
            assert source is not None
            plan, call = self._plans[source.layer], source.call
            is_inside = all(run.value not in self._outside for run in each.reads)
            if is_inside and plan.has_cache_order and last[each.writes[0]] < following:
                found[place] = (
                    *((self._layout.first_of[value], first) for value, first, _ in each.reads),
                    plan, source.num_heads, call.scaling, call.sliding_window, call.softcap,
                    call.sinks_H is None,
                )  # fmt: skip
        return found

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the logits of the requested rows; other steps go to the model's own forward."""
        step = named.get(STEP)
        every, pruned, rows_R = step, None, None
        if isinstance(step, PrunedContext):
            every, pruned, rows_R = step.every, step.pruned, step.rows_R
        if not isinstance(every, PagedContext) or every.state_calls is not None:
            return self.own_forward(*arguments, **named)
        result_RC = self._run(self._embed(named["input_ids"])[0], every, pruned, rows_R)
        # Also if there are as many: those of a captured step may be in any order.
        result_RC = result_RC.index_select(0, named["logits_to_keep"])
        logits_RV = result_RC.new_empty(len(result_RC), self._num_logits)
        self._head.run(logits_RV, result_RC)
        results = [logits_RV[None]]
        for call in self._tail:
            given = (
                argument if place is None else results[place]
                for argument, place in zip(call.arguments, call.places, strict=True)
            )
            results.append(call.function(*given))
        return Logits(results[-1])

    def _run(
        self, hidden_RC: Tensor, every: PagedContext, pruned: Any, rows_R: Tensor | None
    ) -> Tensor:
        """Return the head's input of every token, or of those that the last layer computes."""
        numbers_M = hidden_RC.new_empty(len(hidden_RC) * self._layout.num_columns)
        memory = _Memory(self._layout, self._widths, {self._embedding: hidden_RC}, numbers_M)
        step: Any = every
        noted: dict[tuple[Any, ...], _Attended] = {}
        for place, each in enumerate(self._launches):
            if each.attends is not None:
                if rows_R is not None and place == self._last:
                    every.write(each.attends.layer, self._call(each.attends, each.reads, memory))
                    memory, step = memory.at(rows_R, self._live_at_last, self._outside), pruned
                    noted = {}
                memory.keep(each.writes[0], self._attend(place, each, step, memory, noted))
            elif each.module is not None:
                memory.keep(each.writes[0], each.module(memory.run(each.reads[0])[None])[0])
            else:
                each.run(*map(memory.whole, each.writes), *map(memory.run, each.reads))
        return memory.run(self._head.reads[0])

    def _attend(
        self,
        place: int,
        each: Launch,
        step: Any,
        memory: "_Memory",
        noted: "dict[tuple[Any, ...], _Attended]",
    ) -> Tensor:
        """Return a layer's attention, [R, C], by the launches of an earlier layer of its kind."""
        source = each.attends
        assert source is not None
        layer, call = source.layer, None
        backend = step.backend_of(layer)
        kind = self._kinds.get(place)
        if kind is None or not getattr(backend, "is_repeatable", False):
            call = self._call(source, each.reads, memory)
            return _rows(step.attend(layer, call))
        scales = step.store.scales(layer)
        tensors = (*step.store.pages(layer), source.call.sinks_H, *scale_tensors(scales))
        before = noted.get((backend, *kind))
        if before is not None and before.launches.can_repeat:
            before.launches.repeat(before.tensors, tensors)
            return before.out_RC
        launches = Launches()
        with launches.noted():
            out_RC = _rows(step.attend(layer, self._call(source, each.reads, memory)))
        noted[backend, *kind] = _Attended(launches, tensors, out_RC)
        return out_RC

    def _call(self, source: Attend, reads: tuple[Run, ...], memory: "_Memory") -> AttentionCall:
        kept, plan = source.call, self._plans[source.layer]
        heads = (source.num_heads, plan.num_key_heads, plan.num_key_heads)
        query, key, value = map(memory.heads, reads, heads)
        return AttentionCall(
            query,
            key,
            value,
            kept.scaling,
            kept.sliding_window,
            kept.softcap,
            kept.sinks_H,
        )


class _Attended(NamedTuple):
    """A layer's attention, whose launches are those of all layers of its kind."""

    launches: Launches
    tensors: tuple[Any, ...]  # of its cache, and its sinks
    out_RC: Tensor


def _rows(attended_1RHV: Tensor) -> Tensor:
    return attended_1RHV.reshape(attended_1RHV.shape[1], -1)


class _Memory:
    """The values of a step, whose tensors are made once for all layers."""

    def __init__(
        self,
        layout: Layout,
        widths: Mapping[int, int],
        own: dict[int, Tensor],
        numbers_M: Tensor,
    ) -> None:
        """Take memory of all rows. `own`: values with tensors of their own."""
        self._layout, self._widths, self._own = layout, widths, own
        self._num_rows = len(numbers_M) // layout.num_columns
        self._numbers = numbers_M
        self._made: dict[tuple[int, ...], Tensor] = {}

    def keep(self, value: int, tensor_RC: Tensor) -> None:
        """Take a tensor of its own as a value."""
        self._own[value] = tensor_RC

    def whole(self, value: int) -> Tensor:
        """Return all columns of a value, [R, C]."""
        return self.run(Run(value, 0, self._widths[value]))

    def run(self, run: Run) -> Tensor:
        """Return columns of a value, [R, C]."""
        value, first, width = run
        row = self._widths[value]
        own = self._own.get(value)
        if own is not None:
            return own if width == row else own.narrow(1, first, width)
        key = self._layout.first_of[value], row, first, width
        made = self._made.get(key)
        if made is None:
            begin = self._num_rows * key[0] + first
            made = self._numbers.as_strided((self._num_rows, width), (row, 1), begin)
            self._made[key] = made
        return made

    def heads(self, run: Run, num_heads: int) -> Tensor:
        """Return columns as heads, [1, H, R, D]."""
        value, first, width = run
        row = self._widths[value]
        dim = width // num_heads
        own = self._own.get(value)
        if own is not None:
            return self.run(run).view(-1, num_heads, dim).transpose(0, 1)[None]
        key = self._layout.first_of[value], row, first, width, num_heads
        made = self._made.get(key)
        if made is None:
            begin = self._num_rows * key[0] + first
            shape, strides = (1, num_heads, self._num_rows, dim), (row, dim, row, 1)
            made = self._numbers.as_strided(shape, strides, begin)
            self._made[key] = made
        return made

    def at(self, rows_R: Tensor, values: Sequence[int], outside: set[int]) -> "_Memory":
        """Return the memory of some rows, with these values."""
        own = {
            value: self._own[value].index_select(0, rows_R) for value in values if value in outside
        }
        numbers_M = self._numbers.new_empty(len(rows_R) * self._layout.num_columns)
        cut = _Memory(self._layout, self._widths, own, numbers_M)
        for value in values:
            if value not in outside:
                torch.index_select(self.whole(value), 0, rows_R, out=cut.whole(value))
        return cut
