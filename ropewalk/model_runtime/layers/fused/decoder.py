"""The forward of a model on a CPU, without PyTorch calls between its kernels.

A model's own forward takes about forty PyTorch calls per layer, with copies of queries, keys and
values between them. Here it is a program (program.py) of products, attention and passes over rows.
If a step has few rows, the whole program is one call (fused_decode.py). A head with another kind of
product than the layers is then a second call. If a step has many rows, each product is a call, and
so are all passes over rows between two products.

trace.py finds the operations of a model, and self_check.py tries this forward.

Shapes: T = flat tokens, R = rows, E = dimensions of the hidden state, C = columns of a slot,
B = slots, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeGuard

import numpy as np
import structlog
from torch import Tensor, nn

from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.paged_attention import STEP, Backend, LayerPlan, PagedContext
from ropewalk.model_runtime.attention.ranged_sequences import RangedSequences
from ropewalk.model_runtime.cpu_kernels import fused_decode as kernel
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AttentionParams,
    FusedStep,
    Ints,
    Numbers,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor, row_shares
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import Multiplying
from ropewalk.model_runtime.cpu_kernels.threads import num_threads_for, run_on_threads, run_shares
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.fused.memory import Memory, offsets_of
from ropewalk.model_runtime.layers.fused.mixtures import active_bytes, experts_product
from ropewalk.model_runtime.layers.fused.program import (
    MOST_TABLES,
    Instruction,
    Program,
    build_program,
)
from ropewalk.model_runtime.layers.fused.states import advance_function, advanced, state_arrays
from ropewalk.model_runtime.layers.fused.trace import traced
from ropewalk.model_runtime.layers.joined_linears import can_join
from ropewalk.model_runtime.layers.last_layer import PrunedContext
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way
from ropewalk.model_runtime.probing.probe import are_equal, recorded_calls
from ropewalk.model_runtime.tracing.operations import (
    Advance,
    Attend,
    Enter,
    Leave,
    Product,
    Route,
    UntraceableError,
)
from ropewalk.model_runtime.tracing.passes import join_gates, merge_products

_log = structlog.get_logger(__name__)

_BYTES_PER_THREAD = 4 << 20  # of weights; with fewer, a thread costs more time than it saves
_FAR = 1 << 20  # a position that no short prompt has


class Logits(NamedTuple):
    """The result of a forward."""

    logits: Tensor  # [1, R, V]


def program_or_none(model: Any, plans: Mapping[int, LayerPlan]) -> Program | None:
    """Return the program of a model; None if a part of it has no kernel."""
    try:
        return program_of(model, plans)
    except UntraceableError as error:
        _log.info("decoder_not_fused", model=type(model).__name__, reason=str(error))
        return None


def program_of(model: Any, plans: Mapping[int, LayerPlan]) -> Program:
    """Return the program of a model on a CPU. Raises UntraceableError with the reason.

    Nothing is tried here (equivalence.py), because a forward needs steps over a cache.
    `install_forward.py` has them, and compares this forward with the model's own.
    """
    trace = traced(model, plans)
    calls = recorded_calls(model)
    try:
        far = recorded_calls(model, first_position=_FAR)
    except ModelError as error:  # the model looks up a table by position
        raise UntraceableError("looks up positions") from error
    if not all(are_equal(call, far[index]) for index, call in calls.items()):
        raise UntraceableError("has queries that depend on their positions")
    merge_products(trace, can_join)
    join_gates(trace)
    return build_program(trace, plans)


class DecoderLayers:
    """A model's forward over a paged cache; other calls go to the model's own forward."""

    has_same_bits: ClassVar = True  # as the model's own forward

    def __init__(self, model: Any, program: Program, plans: Mapping[int, LayerPlan]) -> None:
        """Keep the program of a packed model."""
        self.own_forward = model.forward
        self._embed = model.get_input_embeddings()
        self._program, self._plans = program, plans
        *self._instructions, head = program.instructions
        assert isinstance(head.source, Product)
        self._head: PackedProduct = head.source.linears.product
        self._dtype = next(model.parameters()).dtype
        self._attentions = [  # of each layer, with its place
            (place, each.source)
            for place, each in enumerate(self._instructions)
            if isinstance(each.source, Attend)
        ]
        self.read_bytes = (
            0  # of weights that the one call reads for one row; the head may not be among them
        )
        self._trials: dict[Way, PackedProduct] = {}  # one of the kernel's products for each way
        self.has_head = False  # whether the kernel multiplies by the head, too
        self.multiplying: Multiplying | None = None  # None: the layers are not one call
        sources = [each.source for each in self._instructions]
        self._experts_product = experts_product(sources)
        self._advance = advance_function(self._instructions)
        self._note_products()
        self.read_bytes += sum(
            active_bytes(each.mixture) for each in sources if isinstance(each, Leave)
        )
        self._private, self._shared = (
            offsets_of(program, is_shared=each) for each in (False, True)
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the logits of the requested rows; other steps go to the model's own forward."""
        step = named.get(STEP)
        every, pruned, rows_R = step, None, None
        if isinstance(step, PrunedContext):
            every, pruned, rows_R = step.every, step.pruned, step.rows_R.numpy()
        if not self._is_ours(every):
            return self.own_forward(*arguments, **named)
        hidden_TE = as_numpy(self._embed(named["input_ids"])[0])
        rows = named["logits_to_keep"].numpy()
        is_whole = len(rows) == len(hidden_TE)
        if pruned is None and self._is_one_call(len(hidden_TE), every):
            with_head = is_whole and self.has_head
            result_RC = self._all_at_once(hidden_TE, every, with_head=with_head)
            if with_head:
                return self._logits(result_RC)
        else:
            result_RC = self._one_by_one(hidden_TE, every, pruned, rows_R)
        if len(rows) != len(result_RC):
            result_RC = result_RC[rows]
        return self._logits(self._head.multiply(result_RC))

    def takes_pruned(self, plans: Mapping[int, LayerPlan], backend: type[Backend]) -> bool:
        """Return whether rows can be cut after the last layer's write, in steps of a runner."""
        last, _ = self._attentions[-1]
        has_states_behind = any(
            isinstance(each.source, Advance) for each in self._instructions[last:]
        )
        is_ours = plans is self._plans and issubclass(backend, CpuAttention)
        return is_ours and not has_states_behind

    def note_windows(self, model: nn.Module) -> None:
        """Read the windows of all layers again, after they were changed in the model."""
        calls = recorded_calls(model)
        for place, each in self._attentions:
            window = calls[each.layer].sliding_window or 0
            self._program.fields_OF[place, kernel.WINDOW] = window

    def _logits(self, logits_RV: Numbers) -> Logits:
        results = [as_tensor(logits_RV, self._dtype)[None]]
        for call in self._program.tail:
            given = (
                argument if place is None else results[place]
                for argument, place in zip(call.arguments, call.places, strict=True)
            )
            results.append(call.function(*given))
        return Logits(results[-1])

    # Many rows

    def _one_by_one(
        self,
        hidden_TE: Numbers,
        every: PagedContext,
        pruned: PagedContext | None,
        rows_R: Ints | None,
    ) -> Numbers:
        """Return the head's input of every token, or of those that the last layer computes."""
        program = self._program
        arrays: list[Any] = [None] * len(program.slots)
        arrays[program.embedding] = hidden_TE
        step, place = every, 0
        last, _ = self._attentions[-1]
        while place < len(self._instructions):
            each = self._instructions[place]
            source, out = each.source, each.fields[kernel.OUT]
            if isinstance(source, Product):
                arrays[out] = source.linears.product.multiply(arrays[each.fields[kernel.FIRST]])
            elif isinstance(source, Leave):
                x_RK = arrays[each.fields[kernel.THIRD]]
                arrays[out] = source.mixture.multiply(x_RK)
            elif isinstance(source, Advance):
                arrays[out] = advanced(each, source, every, arrays)
            elif isinstance(source, Route | Enter):
                pass  # `Leave` computes the whole mixture
            elif isinstance(source, Attend):
                self._write(each, source, every, arrays)
                if pruned is not None and place == last:
                    step = pruned
                    for slot in program.live_slots[place]:
                        arrays[slot] = arrays[slot][rows_R]
                arrays[out] = self._attend(place, source, step, arrays)
            else:
                place = self._on_rows(place, arrays)
                continue
            place += 1
        return arrays[program.result]  # type: ignore[no-any-return]

    def _on_rows(self, place: int, arrays: list[Any]) -> int:
        """Compute the passes over rows from `place` on; return the place of what follows."""
        program, end = self._program, place
        num_numbers = 0
        while end < len(self._instructions) and _is_on_rows(self._instructions[end]):
            fields = self._instructions[end].fields
            like, out = arrays[fields[kernel.FIRST]], fields[kernel.OUT]
            shape = (len(like), fields[kernel.OUT_WIDTH])
            if arrays[out] is None or arrays[out].shape != shape:
                arrays[out] = np.empty(shape, like.dtype)
            num_numbers += len(like) * fields[kernel.COLUMNS]
            end += 1
        none = [0 if each is None else each.ctypes.data for each in arrays]
        arguments = (
            program.fields_OF[place:end], program.factors_OX[place:end], np.array(none, np.int64),
            like, _LIKE_SCALE,
        )  # fmt: skip
        shares = row_shares(len(like), num_numbers)
        run_shares(kernel.run_blocks, shares, *arguments)
        return end

    def _write(
        self, each: Instruction, source: Attend, step: PagedContext, arrays: list[Any]
    ) -> None:
        """Write a layer's keys and values to the cache."""
        fields = each.fields
        key, value = arrays[fields[kernel.SECOND]], arrays[fields[kernel.THIRD]]
        places = (key, fields[kernel.SECOND_AT], value, fields[kernel.THIRD_AT])
        _cpu(step, source.layer).write_columns(*places, step.store.arrays[source.layer])

    def _attend(self, place: int, source: Attend, step: PagedContext, arrays: list[Any]) -> Numbers:
        """Return a layer's attention, head by head."""
        fields_F, factors_X = self._program.fields_OF[place], self._program.factors_OX[place]
        tables = step.tables.layer(self._plans[source.layer].layer_type)
        (sinks_H,) = self._instructions[place].keeps
        params = AttentionParams(
            tables.kernel_arrays,
            factors_X[kernel.SCALING],
            int(fields_F[kernel.WINDOW]),
            factors_X[kernel.SOFTCAP],
            sinks_H,
        )
        backend, query_TC = _cpu(step, source.layer), arrays[fields_F[kernel.FIRST]]
        pages = step.store.arrays[source.layer]
        return backend.attend(query_TC, source.num_heads, pages, params, backend.ranged(tables))

    # Few rows

    def _all_at_once(self, hidden_RE: Numbers, step: PagedContext, *, with_head: bool) -> Numbers:
        """Return the logits of every row, or the head's input."""
        program, backend, num_rows = self._program, _cpu(step), len(hidden_RE)
        num_operations = len(program.instructions) - (not with_head)
        pages = next(iter(step.store.arrays.values()))
        tables = [step.tables.layer(each).kernel_arrays for each in program.table_types]
        plain_step = FusedStep(
            program.fields_OF[:num_operations],
            program.factors_OX[:num_operations],
            step.store.addresses_LX,
            step.store.num_pages,
            step.store.page_size,
            _LIKE_SCALE,
            backend.destinations,
            backend.sequences,
            *backend.pages_of_groups,
            step.store.group_L,
            state_arrays(step),
            tuple((tables * MOST_TABLES)[:MOST_TABLES]),
        ).unnamed()
        num_threads = self._num_threads(backend)
        shared = Memory(self._shared, num_rows, hidden_RE)
        logits_RV = np.empty(
            (num_rows, self._head.out_features if with_head else 0), hidden_RE.dtype
        )
        own = [Memory(self._private, num_rows, hidden_RE) for _ in range(num_threads)]
        for each in own:
            each.addresses_B += shared.addresses_B
            each.addresses_B[program.embedding] = hidden_RE.ctypes.data
            if with_head:
                each.addresses_B[program.instructions[-1].fields[kernel.OUT]] = (
                    logits_RV.ctypes.data
                )
        assert self.multiplying is not None
        run = kernel.runner_for(
            self.multiplying, backend.access(pages), self._experts_product, self._advance
        )
        arrived = np.zeros(1, np.int64)
        addresses_TB = np.stack([each.addresses_B for each in own])
        arguments = num_threads, arrived, addresses_TB, num_rows, hidden_RE, plain_step
        run_on_threads(run, num_threads, *arguments, arrived=arrived)
        if with_head:
            return logits_RV
        slot = program.slots[program.result]
        memory = shared if slot.is_shared else own[0]
        return memory.rows(program.result, num_rows, slot.width)

    def _num_threads(self, backend: CpuAttention) -> int:
        """Return the number of threads that the size of all weights, or attention, is worth."""
        by_weights = num_threads_for(self.read_bytes // _BYTES_PER_THREAD)
        _, each = self._attentions[0]
        plan = self._plans[each.layer]
        shares = backend.partitioned(each.num_heads, plan.key_dim, plan.num_key_heads)
        return max(by_weights, len(shares))

    def _is_ours(self, step: Any) -> TypeGuard[PagedContext]:
        """Return whether the step reads the cache as the model's layers do, on a CPU."""
        return (
            type(step) is PagedContext
            and step.plans is self._plans
            and isinstance(step.backend, CpuAttention)
        )

    def _is_one_call(self, num_rows: int, step: PagedContext) -> bool:
        """Return whether the kernel takes the step, and the trial of its products still holds.

        It takes no step with drafts of a model with states, which keeps the inputs of layers.
        """
        return (
            self.multiplying is not None
            and step.state_calls is None
            and _cpu(step).is_one_call
            and all(each.skinny(num_rows) is not None for each in self._trials.values())
            and all(self._ranged(step, each) is None for each in self._program.table_types)
        )

    def _ranged(self, step: PagedContext, layer_type: str | None) -> RangedSequences | None:
        """Return the step's sequences that read ranges, which the one call does not take."""
        return _cpu(step).ranged(step.tables.layer(layer_type))

    def _note_products(self) -> None:
        """Write the fields of the layers' products, if the kernel can multiply them in one way.

        The head follows them if it is of their kind. A head of floats beside few bits is not.
        """
        products = [
            (each.source.linears.product, each.source.linears.product.skinny(1))
            for each in self._program.instructions
            if isinstance(each.source, Product)
        ]
        *kinds, head = [None if skinny is None else skinny.multiplying for _, skinny in products]
        # Attention has one kind for all layers, too; odd keys are not multiplied in pairs.
        parities = {plan.key_dim % 2 for plan in self._plans.values()}
        if len(set(kinds)) != 1 or len(parities) != 1:
            return
        self.multiplying, self.has_head = kinds[0], head == kinds[0]
        is_product_O = self._program.fields_OF[:, kernel.CODE] == kernel.PRODUCT
        for place, (product, skinny) in zip(np.flatnonzero(is_product_O), products, strict=True):
            if skinny is None or skinny.multiplying != self.multiplying:
                continue
            fields_F = self._program.fields_OF[place]
            self._trials[product.way] = product
            self.read_bytes += skinny.num_bytes
            fields_F[kernel.ADDRESS] = skinny.packed_Q.ctypes.data
            fields_F[kernel.LENGTH] = skinny.packed_Q.size
            fields_F[kernel.OTHER_ADDRESS] = skinny.bias_N.ctypes.data
            fields_F[kernel.OTHER_LENGTH] = skinny.bias_N.size
            fields_F[kernel.LAYOUT], fields_F[kernel.CHAIN] = skinny.layout, skinny.chain


_LIKE_SCALE = np.empty(0, np.float32)


def _is_on_rows(each: Instruction) -> bool:
    return not isinstance(each.source, Product | Attend | Route | Enter | Leave | Advance)


def _cpu(step: PagedContext, layer: int | None = None) -> CpuAttention:
    """Return the backend of a layer's pages; without a layer that of the first group."""
    backend = step.backend if layer is None else step.backend_of(layer)
    assert isinstance(backend, CpuAttention)
    return backend


def restore(model: nn.Module) -> None:
    if isinstance(vars(model).get("forward"), DecoderLayers):
        del model.forward
