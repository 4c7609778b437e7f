"""The attention function that connects a model's own forward to the paged cache.

Every attention layer of a patched model calls `paged_attention`. It writes the step's keys and
values, unrotated, to their pages. Then it reads all pages of each sequence under that sequence's
own table. The step is passed in the forward's keyword arguments, not in a global.

Shapes: T = flat query tokens, H = query heads, K = key heads, D = key dimensions, V = value
dimensions, N = pages, O = offsets in a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.rope_tables import LayerTables, RopeTables
from ropewalk.model_runtime.errors import ModelError
from ropewalk.rope.angles import half_split_from_interleaved

IMPLEMENTATION = "ropewalk"  # the name of this attention in transformers
STEP = "ropewalk_step"  # the keyword that carries the step through a model's forward


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one layer's call; queries and keys are not rotated."""

    query_1HTD: Tensor
    key_1KTD: Tensor
    value_1KTV: Tensor
    scaling: float  # multiplies every logit
    sliding_window: int | None  # keys that a query sees, itself included; None: all
    softcap: float | None  # c: logits become c * tanh(logit / c)
    sinks_H: Tensor | None  # one more logit per head, without a value


class StepMissingError(ModelError):
    """A layer that calls its attention without the step (see patch_model.py)."""

    def __init__(self, module: nn.Module) -> None:
        self.attention = type(module)
        super().__init__(
            f"{self.attention.__name__} does not pass keyword arguments to its attention"
        )


class StateOperation(NamedTuple):
    """The operation of a layer with states within the one call of a step."""

    fields: dict[int, int]  # by field of `fused_decode.py`
    factors: tuple[float, float]
    keeps: tuple[Any, ...]  # memory whose addresses are among the fields
    advance: Any  # the compiled function that computes it


class StateCall(Protocol):
    """The call of a layer that mixes tokens by a state of each sequence, not by attention."""

    def zeros(self) -> Tensor:
        """Return zeros in the shape of the result, for probes."""

    def advance(self, states: Any, parts: Any) -> Tensor:
        """Advance the states of sequences, and return the result.

        `states`: the layer's slots, and `parts`: those of the step, both of one `SlotStore`.
        """


class CpuStateCall(StateCall, Protocol):
    """A call on a CPU, which the one call of a step and the tokens of drafts need apart."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Return what the layer's products computed, [T, ...] each."""

    def of(self, inputs: Sequence[Tensor]) -> "CpuStateCall":
        """Return the call of the same layer with other inputs."""

    def operation(self) -> StateOperation:
        """Return the operation for the one call of a step."""


class SlotStore(Protocol):
    """The slots of sequences' states, on one kind of device."""

    num_slots: int

    def layer(self, layer_idx: int) -> Any:
        """Return a layer's slots, as the device's calls take them."""

    def parts_of(self, batch: Batch) -> Any:
        """Return the parts of a step's sequences in the same way."""


class StateContext(Protocol):
    """The object in the keyword, as layers with states use it."""

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Return the result of a layer with states."""


class AttentionContext(Protocol):
    """The object in the keyword, which computes each layer's call."""

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the attention's output, [1, T, H, V]."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The rotation and dimensions of one attention layer, found by a probe (see patch_model.py)."""

    num_key_heads: int
    key_dim: int
    value_dim: int
    layer_type: str | None  # selects the table; None: this layer does not rotate
    rotary_dim: int  # dimensions that rotate; the first ones in the cache
    interleaved: bool  # pairs are (2i, 2i + 1) in the model, (i, i + P) in the cache
    rotary_start: int = 0  # the first dimension that rotates in the model
    window: int | None = None  # keys that a query sees, itself included; None: all

    @property
    def has_cache_order(self) -> bool:
        """Return whether the model's dimensions have the order of the cache."""
        return not (self.interleaved or self.rotary_start)

    def in_cache_order(self, x_D: Tensor) -> Tensor:
        """Return queries or keys [..., D] in the cache's order.

        The rotated dimensions are first, in half-split pairs. A score stays the same if query and
        key are reordered in the same way.
        """
        if self.rotary_start:
            end = self.rotary_start + self.rotary_dim
            parts = (x_D[..., self.rotary_start : end], x_D[..., : self.rotary_start])
            x_D = torch.cat((*parts, x_D[..., end:]), dim=-1)
        if self.interleaved:
            x_D = half_split_from_interleaved(x_D, self.rotary_dim)
        return x_D


@dataclass(frozen=True, slots=True)
class LayerRead:
    """The arguments of a backend's read of one layer, besides the batch."""

    query_THD: Tensor  # unrotated, half-split pairs
    keys_NKDO: Tensor  # this layer's pages, unrotated; in any memory order
    values_NKOV: Tensor
    tables: LayerTables
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks_H: Tensor | None
    scales: Scales | None = None  # of the pages' codes; None: they hold numbers


class Backend(Protocol):
    """The cache's reads and writes on one kind of device, in one step."""

    row_keys: ClassVar[bool]  # the memory order of keys, see kv_cache.py
    # True if a step of single tokens makes the same kernel calls for any values in the batch.
    can_capture: ClassVar[bool]

    def __init__(self, batch: Batch) -> None:
        """Prepare the data that all layers of the step use."""

    def of_group(self, batch: Batch) -> Self:
        """Return the backend of another group of layers in the same step (`Batch.of_group`)."""

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,
    ) -> None:
        """Write a layer's keys and values of the step to the pages and offsets in the batch.

        `scales`: of the pages' codes; None: the pages hold numbers.
        """

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of a layer, [T, H, V]; float32, or the query's dtype."""


class PagedContext:
    """The context of a step over the paged cache; `backend` prepares what all layers use."""

    def __init__(
        self,
        batch: Batch,
        store: KVCache,
        tables: RopeTables,
        plans: Mapping[int, LayerPlan],
        backend: type[Backend],
        *,
        states: SlotStore | None = None,
    ) -> None:
        self.parts_X4 = batch.parts_X4
        self.states = states
        self._parts: Any = None  # made for the first layer with states
        # By layer, if the step has drafts: those that turn out right advance the states later.
        self.state_calls: dict[int, StateCall] | None = {} if batch.has_draft_parts else None
        self.store = store
        self.tables = tables
        self.plans = plans
        self.backend = backend(batch)  # of the first group of layers, or of the only one
        self._batch = batch
        self._others: dict[int, Backend] = {}  # of further groups, each made for its first layer

    def backend_of(self, layer_idx: int) -> Backend:
        """Return the backend over the pages of a layer's group."""
        group, _ = self.store.places[layer_idx]
        if not group:
            return self.backend
        if group not in self._others:
            self._others[group] = self.backend.of_group(self._batch.of_group(group))
        return self._others[group]

    def write(self, layer_idx: int, call: AttentionCall) -> None:
        """Write this step's keys and values."""
        plan = self.plans[layer_idx]
        key_TKD = call.key_1KTD[0].transpose(0, 1)
        if not plan.has_cache_order:
            key_TKD = plan.in_cache_order(key_TKD)
        value_TKV = call.value_1KTV[0].transpose(0, 1)
        pages, scales = self.store.pages(layer_idx), self.store.scales(layer_idx)
        self.backend_of(layer_idx).write(*pages, key_TKD, value_TKV, scales)

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Advance a layer's states by this step's tokens."""
        assert self.states is not None, "a layer with states in a model that was planned without"
        if self.state_calls is not None:
            self.state_calls[layer_idx] = call
        if self._parts is None:
            self._parts = self.states.parts_of(self._batch)
        return call.advance(self.states.layer(layer_idx), self._parts)

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Write this step's keys and values, then read every page."""
        self.write(layer_idx, call)
        plan = self.plans[layer_idx]
        query_THD = call.query_1HTD[0].transpose(0, 1)
        if not plan.has_cache_order:
            query_THD = plan.in_cache_order(query_THD)
        read = LayerRead(
            query_THD,
            *self.store.pages(layer_idx),
            self.tables.layer(plan.layer_type),
            call.scaling,
            call.sliding_window,
            call.softcap,
            call.sinks_H,
            self.store.scales(layer_idx),
        )
        return self.backend_of(layer_idx).read(read).to(call.query_1HTD.dtype)[None]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # never built: the pages say who sees what
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, with transformers' signature, by the step in the arguments."""
    step: AttentionContext | None = arguments.get(STEP)
    if step is None:
        raise StepMissingError(module)
    scaling = arguments.get("scaling")
    call = AttentionCall(
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        arguments.get("sliding_window"),
        arguments.get("softcap"),
        arguments.get("s_aux"),
    )
    return step.attend(module.layer_idx, call), None  # type: ignore[arg-type]


def register() -> None:
    """Register this attention with transformers under its name; repeated calls are harmless.

    No masks are registered under the name. Then transformers does not inspect the positions in
    every step to build a mask.
    """
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
