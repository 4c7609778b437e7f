"""The program of a trace: which slot holds which value, and where threads wait for each other.

A value lives in a slot from the operation that computes it to the last that reads it. Then the slot
is used again. Shared slots are written by all threads, a part by each: before an operation reads
one, threads wait at a barrier. A shared slot is written again only after a barrier that follows its
last read, because another thread may still read it.

Shapes: O = operations, F = fields, X = factors, C = columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.cpu_kernels import fused_decode as kernel
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Ints
from ropewalk.model_runtime.layers.fused.mixtures import stage_fields
from ropewalk.model_runtime.tracing.operations import (
    Activate,
    Advance,
    Attend,
    Combine,
    Enter,
    Leave,
    Linears,
    Norm,
    Operand,
    Operation,
    Product,
    Route,
    TailCall,
    Trace,
    UntraceableError,
    Value,
)

MOST_TABLES = 3  # kinds of rotation tables of a model's layers
_CODES = {"add": kernel.ADD, "subtract": kernel.SUBTRACT, "multiply": kernel.MULTIPLY}


class Run(NamedTuple):
    """Columns beside each other in one value."""

    value: int
    at: int


@dataclass(slots=True)
class Slot:
    """A slot's width, and whether all threads write it together."""

    width: int
    is_shared: bool


@dataclass(slots=True)
class Instruction:
    """An operation of the program; `reads` and `writes` are numbers of values."""

    fields: dict[int, int]  # by field of the kernel
    factors: tuple[float, float]
    source: Operation | None  # None: columns are gathered
    reads: dict[int, int]  # field of a slot -> value
    out: int
    keeps: tuple[Any, ...] = ()  # memory whose addresses are among the fields


@dataclass(slots=True)
class Program:
    """A model's layers for the kernel."""

    instructions: list[Instruction]
    slots: list[Slot]
    fields_OF: Ints
    factors_OX: Floats
    embedding: int  # slot
    result: int  # slot of the input of the head
    table_types: list[str | None]  # layer types of the rotation tables, by number
    tail: list[TailCall]  # after the head
    live_slots: list[set[int]]  # of each instruction: those that it or a later one reads

    def linears(self) -> list[Linears]:
        """Return the linears of each product, whose weights are to be laid out."""
        sources = (each.source for each in self.instructions)
        return [each.linears for each in sources if isinstance(each, Product)]


class _Builder:
    """Lowers a trace to instructions, before slots are known."""

    def __init__(self, trace: Trace, plans: Mapping[int, LayerPlan]) -> None:
        self._plans = plans
        self._order = {index: place for place, index in enumerate(sorted(plans))}
        operations = [*trace.operations, *([trace.head] if trace.head else [])]
        self.widths = {each.out.number: each.out.num_columns for each in operations}
        self.widths[trace.embedding.number] = trace.embedding.num_columns
        self._num_values = 1 + max(self.widths)
        self.instructions: list[Instruction] = []
        self.table_types: list[str | None] = []
        self._num_states = 0  # layers with states so far
        for operation in operations:
            self._lower(operation)

    def _lower(self, operation: Operation) -> None:
        if isinstance(operation, Product):
            self._product(operation)
        elif isinstance(operation, Norm):
            self._norm(operation)
        elif isinstance(operation, Combine):
            self._combine(operation)
        elif isinstance(operation, Activate):
            self._activate(operation)
        elif isinstance(operation, Attend):
            self._attend(operation)
        elif isinstance(operation, Advance):
            self._advance(operation)
        elif isinstance(operation, Route | Enter | Leave):
            self._stage(operation)
        else:
            raise UntraceableError(f"has no kernel for {type(operation).__name__}")

    def _add(
        self,
        code: int,
        operation: Operation,
        operands: Sequence[Run],
        fields: dict[int, int],
        *,
        factors: tuple[float, float] = (0.0, 0.0),
        keeps: tuple[Any, ...] = (),
    ) -> None:
        """Add an instruction that reads these runs, in the order of the kernel's operands."""
        out: Value = operation.out
        names = (
            (kernel.FIRST, kernel.FIRST_WIDTH, kernel.FIRST_AT),
            (kernel.SECOND, kernel.SECOND_WIDTH, kernel.SECOND_AT),
            (kernel.THIRD, kernel.THIRD_WIDTH, kernel.THIRD_AT),
            (kernel.FOURTH, kernel.FOURTH_WIDTH, kernel.FOURTH_AT),
        )
        reads = {}
        all_fields = {
            kernel.CODE: code,
            kernel.OUT_WIDTH: out.num_columns,
            kernel.COLUMNS: out.num_columns,
            kernel.SECOND: kernel.NO_SLOT,
            kernel.THIRD: kernel.NO_SLOT,
            **fields,
        }
        for (slot, width, at), run in zip(names, operands, strict=False):
            reads[slot] = run.value
            all_fields |= {width: self.widths[run.value], at: run.at}
        self.instructions.append(
            Instruction(all_fields, factors, operation, reads, out.number, keeps)
        )

    def _product(self, each: Product) -> None:
        self._add(kernel.PRODUCT, each, [self._run(each.x, is_whole=True)], {})

    def _norm(self, each: Norm) -> None:
        norm = each.norm
        fields = {
            kernel.ADDRESS: norm.scale_D.ctypes.data,
            kernel.OTHER_ADDRESS: norm.shift_D.ctypes.data,
            kernel.KIND: int(norm.is_centered),
            kernel.DIM: len(norm.scale_D),
        }
        self._add(
            kernel.NORM, each, [self._run(each.x)], fields, factors=(float(norm.eps), 0.0),
            keeps=(norm,),
        )  # fmt: skip

    def _combine(self, each: Combine) -> None:
        code, runs = _CODES[each.name], [self._run(each.x)]
        if isinstance(each.other, Operand):
            runs.append(self._run(each.other))
            self._add(code, each, runs, {})
        else:
            fields = {kernel.ADDRESS: each.other.ctypes.data}
            self._add(code, each, runs, fields, keeps=(each.other,))

    def _activate(self, each: Activate) -> None:
        fields, runs = {kernel.KIND: each.kind}, [self._run(each.x)]
        if each.up is not None:
            runs.append(self._run(each.up))
        self._add(kernel.ACTIVATE, each, runs, fields)

    def _attend(self, each: Attend) -> None:
        plan, sinks_H = self._plans[each.layer], _sinks(each)
        if plan.layer_type not in self.table_types:
            self.table_types.append(plan.layer_type)
        num_key_columns = plan.num_key_heads * plan.key_dim
        widths = (
            each.num_heads * plan.key_dim,
            num_key_columns,
            plan.num_key_heads * plan.value_dim,
        )
        operands = (each.query, each.key, each.value)
        if tuple(len(operand.columns_C) for operand in operands) != widths:
            raise UntraceableError("attends with other heads than its plan has")
        runs = [self._run(each.query, is_first=True), self._run(each.key), self._run(each.value)]
        fields = {
            kernel.ADDRESS: sinks_H.ctypes.data,
            kernel.LENGTH: len(sinks_H),
            kernel.DIM: plan.key_dim,
            kernel.LAYER: self._order[each.layer],
            kernel.TABLES: self.table_types.index(plan.layer_type),
            kernel.NUM_HEADS: each.num_heads,
            kernel.NUM_KEY_HEADS: plan.num_key_heads,
            kernel.VALUE_DIM: plan.value_dim,
            kernel.WINDOW: each.call.sliding_window or 0,
        }
        factors = (each.call.scaling, each.call.softcap or 0.0)
        self._add(kernel.ATTEND, each, runs, fields, factors=factors, keeps=(sinks_H,))

    def _advance(self, each: Advance) -> None:
        fields, factors, keeps, _ = each.call.operation()
        runs = [self._run(operand) for operand in each.inputs]
        layers = {kernel.LAYER: self._num_states}
        self._num_states += 1
        code = fields[kernel.CODE]
        self._add(code, each, runs, fields | layers, factors=factors, keeps=keeps)

    def _stage(self, each: Route | Enter | Leave) -> None:
        if isinstance(each, Route):
            code, operands = kernel.ROUTE, [each.x]
        elif isinstance(each, Enter):
            code, operands = kernel.ENTER, [each.x, each.logits]
        else:
            code, operands = kernel.LEAVE, [each.between, each.logits, each.x]
        runs = [self._run(operand, is_whole=True) for operand in operands]
        keeps, fields, factors = stage_fields(each)
        self._add(code, each, runs, fields, factors=factors, keeps=keeps)

    def _run(self, operand: Operand, *, is_whole: bool = False, is_first: bool = False) -> Run:
        """Return the operand as columns beside each other, gathered if they are not.

        `is_whole`: they must be all columns of a value; `is_first`: its first ones.
        """
        value, at = int(operand.values_C[0]), int(operand.columns_C[0])
        num = len(operand.columns_C)
        is_run = (operand.values_C == value).all() and (
            operand.columns_C == np.arange(at, at + num)
        ).all()
        if is_run and not ((is_whole or is_first) and at) and not (
            is_whole and num != self.widths[value]
        ):  # fmt: skip
            return Run(value, at)
        return Run(self._gather(operand), 0)

    def _gather(self, operand: Operand) -> int:
        """Add instructions that gather columns of one value or more; return the new value."""
        number, num = self._num_values, len(operand.columns_C)
        self._num_values += 1
        self.widths[number] = num
        edges = np.flatnonzero(np.diff(operand.values_C)) + 1
        for part in np.split(np.arange(num), edges):
            value = int(operand.values_C[part[0]])
            index_C = np.ascontiguousarray(operand.columns_C[part])
            fields = {
                kernel.CODE: kernel.GATHER,
                kernel.OUT_WIDTH: num,
                kernel.OUT_AT: int(part[0]),
                kernel.COLUMNS: len(part),
                kernel.FIRST_WIDTH: self.widths[value],
                kernel.SECOND: kernel.NO_SLOT,
                kernel.THIRD: kernel.NO_SLOT,
                kernel.ADDRESS: index_C.ctypes.data,
            }
            reads = {kernel.FIRST: value}
            gathered = Instruction(fields, (0.0, 0.0), None, reads, number, (index_C,))
            self.instructions.append(gathered)
        return number


def _sinks(each: Attend) -> Floats:
    sinks_H = each.call.sinks_H
    if sinks_H is None:
        return np.empty(0, np.float32)
    return sinks_H.detach().float().contiguous().numpy().copy()  # not of the file of the weights


def build_program(trace: Trace, plans: Mapping[int, LayerPlan]) -> Program:
    """Return the program of a trace; its last instruction is the head. Raises UntraceableError."""
    built = _Builder(trace, plans)
    if len(built.table_types) > MOST_TABLES:
        raise UntraceableError(f"has {len(built.table_types)} kinds of rotation tables")
    instructions = built.instructions
    last_reads: dict[int, int] = {trace.embedding.number: 0}
    for place, each in enumerate(instructions):
        last_reads.update(dict.fromkeys([each.out, *each.reads.values()], place))
    slots, slot_of = _allocate(built, trace.embedding.number, last_reads)
    fields_OF = np.zeros((len(instructions), kernel.NUM_FIELDS), np.int64)
    for fields_F, each in zip(fields_OF, instructions, strict=True):
        each.fields[kernel.OUT] = slot_of[each.out]
        each.fields |= {name: slot_of[value] for name, value in each.reads.items()}
        for name, number in each.fields.items():
            fields_F[name] = number
    factors_OX = np.array([each.factors for each in instructions], np.float32)
    result = next(iter(instructions[-1].reads.values()))
    return Program(
        instructions,
        slots,
        fields_OF,
        factors_OX,
        slot_of[trace.embedding.number],
        slot_of[result],
        built.table_types,
        trace.tail,
        _live_slots(instructions, slot_of),
    )


def _live_slots(instructions: Sequence[Instruction], slot_of: Mapping[int, int]) -> list[set[int]]:
    """Return the slots of values that are needed when each instruction begins."""
    needed: set[int] = set()
    found = []
    for each in reversed(instructions):
        needed = (needed - {each.out}) | set(each.reads.values())
        found.append({slot_of[value] for value in needed})
    return found[::-1]


def _is_shared(each: Instruction) -> bool:
    return each.fields[kernel.CODE] >= kernel.PRODUCT


def _allocate(
    built: _Builder, embedding: int, last_reads: Mapping[int, int]
) -> tuple[list[Slot], dict[int, int]]:
    """Give every value a slot, and set the barriers."""
    slots = [Slot(built.widths[embedding], is_shared=True)]
    slot_of = {embedding: 0}
    live = {embedding}
    free: list[tuple[int, int]] = []  # slots without a value, and the place of their last read
    unread: set[int] = set()  # shared values that were written after the last barrier
    fence = 0  # all threads have ended the operations before this place
    for place, each in enumerate(built.instructions):
        needed = set(each.reads.values())
        is_attention = each.fields[kernel.CODE] == kernel.ATTEND
        each.fields[kernel.BARRIER] = int(bool(needed & unread))
        if needed & unread or is_attention:  # attention waits after it has written
            unread, fence = set(), place
        if each.out not in slot_of:
            kind = Slot(built.widths[each.out], _is_shared(each))
            usable = [
                slot
                for slot, read in free
                if slots[slot] == kind and (read < fence or not kind.is_shared)
            ]
            if place == len(built.instructions) - 1:
                usable = []  # the logits outlive the step
            slot = usable[0] if usable else len(slots)
            if not usable:
                slots.append(kind)
            free = [pair for pair in free if pair[0] != slot]
            slot_of[each.out] = slot
            live.add(each.out)
        if _is_shared(each):
            unread.add(each.out)
        ended = {value for value in live if last_reads[value] <= place}
        free += [(slot_of[value], last_reads[value]) for value in ended]
        live -= ended
    return slots, slot_of
