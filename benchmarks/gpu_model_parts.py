"""The parts of the whole-model benchmark. Each part yields its rows as it measures them.

A row becomes a line of JSON, and its `part` names the measurement. A row with `"part": "left_out"`
names a measurement that was left out, and the reason.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu_engine import Measured, measured
from benchmarks.gpu_model_inputs import (
    ModelSizes,
    Prompts,
    deployment_of,
    random_model,
    taken_over,
    twin,
)
from benchmarks.gpu_needs import lacks_to_serve
from benchmarks.gpu_rotated_keys import KINDS
from benchmarks.gpu_server import ServerError, serve_and_load
from benchmarks.gpu_transformers import Batching, Contender, Generating, contenders
from model_runtime.deployment import Deployment
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.runner.model_runner import ModelRunner

Row = dict[str, Any]
OURS = "ropewalk"
_WARM_UP_LEN = 4  # tokens of the answers that warm up


@dataclass(frozen=True)
class Bench:
    """The objects that the parts share: sizes, models, the machine's rates, and the deadline."""

    sizes: ModelSizes
    device: torch.device
    copy_bytes_s: float
    matrix_flop_s: float
    end: float  # deadline on the clock of time.monotonic()
    prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", Prompts(self.sizes.shape.vocab))

    @cached_property
    def theirs(self) -> LlamaForCausalLM:
        """Return the model that transformers runs."""
        sizes = self.sizes
        return random_model(sizes.shape, sizes.native_len, sizes.dtype, self.device)

    def twin(self) -> LlamaForCausalLM:
        """Build another model over the same weights."""
        return twin(self.theirs, self.sizes.shape, self.sizes.native_len)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Return a patched model over the same weights."""
        return taken_over(self.twin())

    @cached_property
    def deployment(self) -> Deployment:
        """Return the deployment, under which every request grows through the tiers."""
        return deployment_of(self.checkpoint, self.sizes)

    def has_time(self, seconds: float = 0.0) -> bool:
        """Return whether more than `seconds` are left before the deadline."""
        return time.monotonic() + seconds < self.end

    def engine(
        self,
        stack: ExitStack,
        num_sequences: int,
        *,
        chunk_len: int | None = None,
        records: bool = True,
        make: type[ModelRunner] = ModelRunner,
    ) -> Measured:
        """Start an engine of ours, which stops when the stack ends."""
        chunk_len = chunk_len or self.sizes.chunk_len
        config = self.sizes.config(chunk_len, num_sequences, records=records)
        return stack.enter_context(measured(self.checkpoint, self.deployment, config, make))


def left_out(what: str, why: str) -> Row:
    """Build the row of a measurement that was left out."""
    return {"part": "left_out", "what": what, "why": why}


def decode(bench: Bench) -> Iterator[Row]:
    """Measure short prompts with long answers, ours and transformers' in turns."""
    sizes = bench.sizes
    with ExitStack() as stack:
        ours = {
            name: bench.engine(stack, max(sizes.batches), records=records)
            for name, records in ((OURS, True), (f"{OURS}, not recorded", False))
        }
        for batch in sizes.batches:
            for engine in ours.values():
                engine.serve(bench.prompts.of(sizes.prompt_len, batch), _WARM_UP_LEN)
            with ExitStack() as others:
                running: dict[str, Contender] = {}
                num_cached = batch * (sizes.prompt_len + sizes.output_len + 256)
                for name, make in contenders(bench.twin, num_cached).items():
                    if batch == 1 and name != "generate":
                        continue
                    try:
                        running[name] = _started(bench, make, batch, _WARM_UP_LEN, others)
                    except _NotRunningError as error:
                        yield left_out(f"{name}, {batch} at once", str(error))
                for name, contender in running.items():
                    if isinstance(contender, Batching):
                        row = {"part": "contender", "who": name}
                        yield {**row, "attention": contender.used_attention}
                yield from _rounds(bench, batch, ours, running)


class _NotRunningError(Exception):
    """A contender cannot take part; the message gives the reason."""


def _started(
    bench: Bench, make: Callable[[], Contender], batch: int, num_output: int, stack: ExitStack
) -> Contender:
    """Start and warm up a contender until the stack ends. Raises _NotRunningError."""
    if not bench.has_time():
        raise _NotRunningError("no time was left")
    try:
        contender = make()
        stack.callback(contender.close)
        contender.answer(bench.prompts.of(bench.sizes.prompt_len, batch), num_output)
    except Exception as error:  # code of another project, on an unknown machine
        text = " ".join(str(error).split())
        raise _NotRunningError(f"{type(error).__name__}: {text[:300]}") from error
    return contender


def _rounds(
    bench: Bench, batch: int, ours: Mapping[str, Measured], running: Mapping[str, Contender]
) -> Iterator[Row]:
    """Yield the rows of all rounds. In a round all engines answer the same new prompts."""
    sizes = bench.sizes
    num_tokens = batch * sizes.output_len
    took, first = 0.0, time.monotonic()
    for number in range(sizes.rounds):
        begin = time.monotonic()
        if begin - first > sizes.most_decode_s or not bench.has_time(took):
            yield left_out(f"decode, {batch} at once, round {number}", "no time was left")
            return
        prompts = bench.prompts.of(sizes.prompt_len, batch)
        row = {"part": "decode", "sequences": batch, "round": number}
        for name, engine in ours.items():
            served = engine.serve(prompts, sizes.output_len)
            step_s = served.decode_median_s(batch)
            yield {
                **row,
                "who": name,
                "seconds": served.seconds,
                "tokens_s": num_tokens / served.seconds,
                "step_s": step_s,
                "share_of_copy": sizes.step_bytes / step_s / bench.copy_bytes_s,
            }
        for name, contender in running.items():
            answered = contender.answer(prompts, sizes.output_len)
            yield {
                **row,
                "who": name,
                **asdict(answered),
                "tokens_s": num_tokens / answered.seconds,
            }
        took = time.monotonic() - begin


def prefill(bench: Bench) -> Iterator[Row]:
    """Measure a long prompt in chunks of several lengths, then first tokens by context."""
    sizes = bench.sizes
    operations = sizes.prefill_operations(sizes.prefill_len)
    for chunk_len in sizes.chunk_lens:
        with ExitStack() as stack:
            engine = bench.engine(stack, 1, chunk_len=chunk_len, records=False)
            engine.serve(bench.prompts.of(sizes.prefill_len), 1)
            for number in range(sizes.rounds):
                served = engine.serve(bench.prompts.of(sizes.prefill_len), 1)
                yield {
                    "part": "prefill",
                    "chunk": chunk_len,
                    "tokens": sizes.prefill_len,
                    "round": number,
                    "seconds": served.first_token_s,
                    "share_of_matrix": operations / served.first_token_s / bench.matrix_flop_s,
                }
    with ExitStack() as stack:
        engine = bench.engine(stack, 1, records=False)
        engine.serve(bench.prompts.of(2 * sizes.chunk_len), 1)
        yield from _first_tokens(bench, engine)


def _first_tokens(bench: Bench, engine: Measured) -> Iterator[Row]:
    sizes = bench.sizes
    took: dict[int, float] = {}
    for number in range(sizes.rounds):
        for context in sizes.contexts:
            if number and context > sizes.most_repeated:
                continue
            if not bench.has_time(took.get(context, 0.0)):
                yield left_out(f"first token at {context}, round {number}", "no time was left")
                continue
            served = engine.serve(bench.prompts.of(context), 1)
            took[context] = served.seconds
            row = {"part": "first_token", "context": context, "round": number}
            yield {**row, "seconds": served.first_token_s}


def growth(bench: Bench) -> Iterator[Row]:
    """Measure the step in which a decoding sequence leaves its tier, beside the other steps."""
    sizes = bench.sizes
    answer_len = sizes.num_steps + 1
    (prompt,) = bench.prompts.of(sizes.crossed_ceiling - answer_len // 2)
    with ExitStack() as stack:
        engine = bench.engine(stack, 1)
        for number in range(sizes.rounds + 1):
            if not bench.has_time():
                yield left_out(f"growth, round {number}", "no time was left")
                return
            # The first round is the warm-up. Later rounds find the prompt in the prefix cache.
            served = engine.serve([prompt], answer_len)
            if number == 0:
                continue
            ordinary = sorted(served.decode_s(1))
            yield {
                "part": "growth",
                "ceiling": sizes.crossed_ceiling,
                "round": number - 1,
                "crossing_s": served.crossing_s(),
                "step_s": served.decode_median_s(1),
                "slowest_step_s": ordinary[-1],
            }


def rotation(bench: Bench) -> Iterator[Row]:
    """Measure whole decode steps over the three kinds of cache, in turns at every size."""
    sizes = bench.sizes
    with ExitStack() as stack:
        most = max(count for _, count in sizes.steps)
        engines = {kind: bench.engine(stack, most, make=make) for kind, make in KINDS.items()}
        warmed: set[str] = set()
        for context, count in sizes.steps:
            for kind, engine in engines.items():
                what = f"steps at {context} with {count} sequences, {kind}"
                if not bench.has_time():
                    yield left_out(what, "no time was left")
                    continue
                if kind not in warmed:
                    engine.serve(bench.prompts.of(sizes.prompt_len), _WARM_UP_LEN)
                    warmed.add(kind)
                prompts = bench.prompts.of(context - sizes.num_steps, count)
                # The last token is never read back, so one more token fills the context.
                served = engine.serve(prompts, sizes.num_steps + 1)
                yield {
                    "part": "rotation",
                    "context": context,
                    "sequences": count,
                    "kind": kind,
                    "steps": len(served.decode_s(count)),
                    "step_s": served.decode_median_s(count),
                }


def server(bench: Bench) -> Iterator[Row]:
    """Run `ropewalk bench` against `ropewalk serve`, and read /metrics."""
    missing = lacks_to_serve()
    if missing:
        yield left_out("the server", f"not installed: {', '.join(missing)}")
        return
    if not bench.has_time(bench.sizes.server.most_s):
        yield left_out("the server", "no time was left")
        return
    try:
        yield from serve_and_load(bench.sizes, bench.device)
    except ServerError as error:
        yield left_out("the server", str(error))


def compiled(bench: Bench) -> Iterator[Row]:
    """Measure transformers' `generate` with its static cache, which it compiles, by itself."""
    sizes = bench.sizes
    name = "generate, compiled"
    if bench.device.type != "cuda":
        yield left_out(name, "transformers compiles on a GPU only")
        return
    for batch in sizes.batches:
        if not bench.has_time(sizes.compile_s):
            yield left_out(f"{name}, {batch} at once", "no time was left")
            continue
        with ExitStack() as stack:
            try:
                # Code is compiled for the cache's length, so the warm-up answers at full length.
                contender = _started(
                    bench,
                    lambda: Generating(bench.twin(), "static"),
                    batch,
                    sizes.output_len,
                    stack,
                )
            except _NotRunningError as error:
                yield left_out(f"{name}, {batch} at once", str(error))
                continue
            yield from _rounds(bench, batch, {}, {name: contender})


PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode,
    "prefill": prefill,
    "growth": growth,
    "rotation": rotation,
    "server": server,
    "compiled": compiled,
}
