"""The parts of the whole-model benchmark, and the objects that they share.

A row becomes a line of JSON, and its `part` names the measurement. A row with `"part": "left_out"`
names a measurement that was left out, and the reason.
"""

import cProfile
import io
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from benchmarks.gpu.engine import Measured, free_memory, measured
from benchmarks.gpu.model_inputs import (
    ModelSizes,
    Prompts,
    deployment_of,
    random_model,
    random_windows,
    taken_over,
)
from benchmarks.gpu.needs import lacks_to_serve
from benchmarks.gpu.server import ServerError, serve_and_load
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.quantised.page_format import EXACT, FIXED8
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.engine.memory.memory_profile import CudaMeter, profile_memory
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.transfer import wait_for

Row = dict[str, Any]
OURS = "ropewalk"
WARM_UP_LEN = 4  # tokens of the answers that warm up
_SHARE = 0.9  # of the device's memory, as a server has by default
_DRAFT_TOKENS = 7  # of a sequence in a step
_PROFILED_LEN = 4  # tokens of the answers whose steps are profiled
# Settings of sampling by name; none of them is the engine's fastest way.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "greedy, 5 logprobs": {"logprobs": 5},
}
_SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 64}'


@dataclass(frozen=True)
class Bench:
    """The objects that the parts share: sizes, models, the machine's rates, and the deadline."""

    sizes: ModelSizes
    device: torch.device
    copy_bytes_s: float
    matrix_flop_s: float
    end: float  # deadline on the clock of time.monotonic()
    folder: Path  # where tables go that are no rows
    is_tiny: bool = False
    prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", Prompts(self.sizes.shape.vocab))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Return a patched model of random weights."""
        sizes = self.sizes
        return taken_over(random_model(sizes.shape, sizes.native_len, sizes.dtype, self.device))

    @cached_property
    def deployment(self) -> Deployment:
        """Return the deployment, under which every request grows through the tiers."""
        return deployment_of(self.checkpoint, self.sizes)

    def has_time(self, seconds: float = 0.0) -> bool:
        return time.monotonic() + seconds < self.end

    def engine(
        self,
        stack: ExitStack,
        num_sequences: int,
        *,
        chunk_len: int | None = None,
        records: bool = True,
        max_draft_tokens: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> Measured:
        """Start an engine of ours, which stops when the stack ends."""
        chunk_len = chunk_len or self.sizes.chunk_len
        config = self.sizes.config(chunk_len, num_sequences, records=records)
        config = replace(config, max_draft_tokens=max_draft_tokens, kv_cache_dtype=kv_cache_dtype)
        return stack.enter_context(measured(self.checkpoint, self.deployment, config))


def left_out(what: str, why: str) -> Row:
    return {"part": "left_out", "what": what, "why": why}


def decode(bench: Bench) -> Iterator[Row]:
    """Measure short prompts with long answers, with and without recorded steps."""
    sizes = bench.sizes
    with ExitStack() as stack:
        ours = {
            name: bench.engine(stack, max(sizes.batches), records=records)
            for name, records in ((OURS, True), (f"{OURS}, not recorded", False))
        }
        for batch in sizes.batches:
            took = 0.0
            for number in range(sizes.rounds):
                if not bench.has_time(took):
                    yield left_out(f"decode, {batch} at once, round {number}", "no time was left")
                    break
                took = 0.0
                prompts = bench.prompts.of(sizes.prompt_len, batch)
                for name, engine in ours.items():
                    row = _decoded(bench, engine, prompts)
                    took += row["seconds"]
                    yield {"part": "decode", "round": number, "who": name, **row}


def _decoded(bench: Bench, engine: Measured, prompts: Sequence[list[int]]) -> Row:
    """Return the rates of answers to these prompts. The first round of a size may compile."""
    batch, num_output = len(prompts), bench.sizes.output_len
    served = engine.serve(prompts, num_output)
    step_s = served.decode_median_s(batch)
    return {
        "sequences": batch,
        "seconds": served.seconds,
        "tokens_s": batch * num_output / served.seconds,
        "share_of_copy": bench.sizes.step_bytes / step_s / bench.copy_bytes_s,
        **served.summary(batch),
    }


def contenders(bench: Bench) -> Iterator[Row]:
    """Measure transformers on the same weights, each way in a process of its own."""
    for batch in bench.sizes.contender_batches:
        for name in ("generate", "continuous", "continuous, graphs"):
            if batch > 1 or name == "generate":
                yield from _contend(bench, name, batch)


def compiled(bench: Bench) -> Iterator[Row]:
    """Measure transformers' `generate` with its static cache, which it compiles."""
    for batch in bench.sizes.contender_batches:
        if bench.device.type == "cuda":
            yield from _contend(bench, "generate, compiled", batch)
        else:
            yield left_out("generate, compiled", "transformers compiles on a GPU only")
            return


def _contend(bench: Bench, name: str, batch: int) -> Iterator[Row]:
    """Run a contender in a process with a time limit; its rounds so far count in any case."""
    what = f"{name}, {batch} at once"
    limit = bench.sizes.contender_s
    if not bench.has_time(limit / 2):
        yield left_out(what, "no time was left")
        return
    free_memory()
    path = bench.folder / "contender.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.transformers", name, str(batch), str(path)]
    command += ["--tiny"] if bench.is_tiny else []
    fault = ""
    try:
        ended = subprocess.run(  # noqa: S603  # our own
            command, timeout=limit, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            fault = (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]
    except subprocess.TimeoutExpired:
        fault = f"it did not end in {limit:g} s"
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())
        path.unlink()
    if fault:
        yield left_out(what, fault)


def prefill(bench: Bench) -> Iterator[Row]:
    """Measure a long prompt in chunks of several lengths, then first tokens by context."""
    sizes = bench.sizes
    operations = sizes.prefill_operations(sizes.prefill_len)
    for chunk_len in sizes.chunk_lens:
        with ExitStack() as stack:
            engine = bench.engine(stack, 1, chunk_len=chunk_len, records=False)
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
            # A length of its own each time, as users' prompts have.
            num_tokens = context - bench.prompts.below(context // 8)
            served = engine.serve(bench.prompts.of(num_tokens), 1)
            took[context] = served.seconds
            row = {"part": "first_token", "context": context, "tokens": num_tokens}
            yield {**row, "round": number, "seconds": served.first_token_s}


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


def bursts(bench: Bench) -> Iterator[Row]:
    """Measure prompts that are sent together: until the last of them has its first token."""
    with ExitStack() as stack:
        engine = bench.engine(stack, max(count for _, count in bench.sizes.bursts))
        for num_tokens, count in bench.sizes.bursts:
            for number in range(bench.sizes.rounds):
                if not bench.has_time():
                    yield left_out(f"a burst of {count}, round {number}", "no time was left")
                    break
                served = engine.serve(bench.prompts.of(num_tokens, count), 1)
                yield {
                    "part": "burst",
                    "tokens": num_tokens,
                    "prompts": count,
                    "round": number,
                    "seconds": served.first_token_s,
                    "prompt_tokens_s": num_tokens * count / served.first_token_s,
                }


def short_prompts(bench: Bench) -> Iterator[Row]:
    """Measure first tokens of short prompts, as rows of captured steps and queued, in turns."""
    sizes = bench.sizes
    with ExitStack() as stack:
        captured, queued = (bench.engine(stack, 1, records=records) for records in (True, False))
        for num_tokens, context in sizes.short_prompts:
            (before,) = bench.prompts.of(context) if context else ([],)
            for number in range(2 * sizes.rounds):
                if not bench.has_time():
                    yield left_out(f"a short prompt, round {number}", "no time was left")
                    break
                row: Row = {"part": "short_prompt", "tokens": num_tokens, "context": context}
                (tokens,) = bench.prompts.of(num_tokens)
                for name, engine in (("captured_s", captured), ("queued_s", queued)):
                    if context and not number:
                        engine.serve([before], 1)
                    row[name] = engine.serve([[*before, *tokens]], 1).first_token_s
                yield {**row, "round": number}


def arrivals(bench: Bench) -> Iterator[Row]:
    """Measure steps that decode and also read prompts, which arrive at an even rate."""
    sizes = bench.sizes
    count, gap_s = sizes.arrivals
    with ExitStack() as stack:
        engine = bench.engine(stack, count)
        for number in range(sizes.rounds):
            if not bench.has_time():
                yield left_out(f"arrivals, round {number}", "no time was left")
                return
            most = 8 * sizes.prompt_len
            lengths = [sizes.prompt_len + bench.prompts.below(most) for _ in range(count)]
            prompts = [bench.prompts.of(each)[0] for each in lengths]
            served = engine.serve(prompts, sizes.output_len, gap_s=gap_s)
            row = {"part": "arrivals", "requests": count, "gap_s": gap_s, "round": number}
            rate = count * sizes.output_len / served.seconds
            yield {**row, "tokens_s": rate, **served.mixed_summary()}


def sampling(bench: Bench) -> Iterator[Row]:
    """Measure decode steps with other settings than greedy, and with a grammar."""
    sizes, count = bench.sizes, bench.sizes.sampled
    compiler = GrammarCompiler(bench.checkpoint.tokenizer)
    grammar = compiler.compile(_SCHEMA).result()
    settings = {name: (None, setting) for name, setting in _SETTINGS.items()}
    with ExitStack() as stack:
        engine = bench.engine(stack, count)
        for name, (rule, setting) in {**settings, "a grammar": (grammar, {})}.items():
            if not bench.has_time():
                yield left_out(f"sampling, {name}", "no time was left")
                continue
            for number in range(2):  # the first may compile
                prompts = bench.prompts.of(sizes.prompt_len, count)
                served = engine.serve(prompts, sizes.output_len, grammar=rule, **setting)
                row = {"part": "sampling", "setting": name, "sequences": count, "round": number}
                yield {**row, **served.summary(count)}


def drafts(bench: Bench) -> Iterator[Row]:
    """Measure answers that are edits of a known text, with and without drafts, in turns.

    The text of each is its answer without drafts, with one token of sixteen replaced.
    """
    sizes = bench.sizes
    with ExitStack() as stack:
        without, drafting = (
            bench.engine(stack, max(sizes.drafted), max_draft_tokens=most)
            for most in (0, _DRAFT_TOKENS)
        )
        for count in sizes.drafted:
            for number in range(sizes.rounds):
                if not bench.has_time():
                    yield left_out(f"drafts, {count} at once, round {number}", "no time was left")
                    break
                prompts = bench.prompts.of(sizes.prompt_len, count)
                plain = without.serve(prompts, sizes.output_len)
                edited = [
                    [0 if at % 16 == 15 else token for at, token in enumerate(answer)]
                    for answer in plain.answers
                ]
                drafted = drafting.serve(prompts, sizes.output_len, predictions=edited)
                pairs = zip(plain.answers, drafted.answers, strict=True)
                yield {
                    "part": "drafts",
                    "sequences": count,
                    "round": number,
                    "plain_tokens_s": plain.decode_tokens_s,
                    "drafted_tokens_s": drafted.decode_tokens_s,
                    "accepted": drafted.num_accepted / max(1, drafted.num_drafted),
                    "equal": sum(one == other for one, other in pairs) / count,
                }


def windows(bench: Bench) -> Iterator[Row]:
    """Measure a model of the same shape whose layers all have a sliding window."""
    sizes = bench.sizes
    checkpoint = taken_over(random_windows(sizes, bench.device))
    deployment = deployment_of(checkpoint, sizes)
    config = sizes.config(sizes.chunk_len, max(count for _, count in sizes.steps))
    with measured(checkpoint, deployment, config) as engine:
        yield from _steps(bench, engine, sizes.steps, {"part": "windows"})


def _steps(
    bench: Bench, engine: Measured, steps: Sequence[tuple[int, int]], told: Row
) -> Iterator[Row]:
    """Yield the times of steps, and of first tokens, by (context, sequences); `told`: in each."""
    num_steps, what = bench.sizes.num_steps, ", ".join(told.values())
    for context, count in steps:
        for number in range(2):  # the first may compile
            if not bench.has_time():
                yield left_out(f"{what}, {count} at {context}", "no time was left")
                break
            served = engine.serve(bench.prompts.of(context - num_steps, count), num_steps + 1)
            row = {**told, "context": context, "sequences": count, "round": number}
            yield {**row, "first_token_s": served.first_token_s, **served.summary(count)}


def few_bits(bench: Bench) -> Iterator[Row]:
    """Measure decode steps over a cache in eight bits, beside one in the model's numbers.

    Steps over the longest context are left out, because its prompt is computed for each form.
    """
    sizes = bench.sizes
    steps = [each for each in sizes.steps if each[0] < sizes.longest]
    most = max(count for _, count in steps)
    for kind in (EXACT, FIXED8):
        with ExitStack() as stack:
            engine = bench.engine(stack, most, kv_cache_dtype=kind)
            yield from _steps(bench, engine, steps, {"part": "few_bits", "kind": kind})


def queued(bench: Bench) -> Iterator[Row]:
    """Measure a step that is not captured: a prompt beside decodes, queued kernel by kernel.

    A table of the host's functions, by Python's profiler, goes to a file of its own.
    """
    sizes = bench.sizes
    num_decodes = min(8, max(sizes.batches))
    config = sizes.config(sizes.chunk_len, num_decodes + 1, records=False)
    profiles = [tier.profile for tier in bench.deployment.own_tiers]
    runner = build_runner(bench.checkpoint, config, profiles)
    table_id, pages = runner.table_id(profiles[0]), range(config.num_pages)
    prompt_len = sizes.prompt_len
    span = partial(Span, pages=pages, table_id=table_id)
    decode = span([0], prompt_len, logit_rows=range(1))
    prompt = span([0] * prompt_len, 0, logit_rows=range(prompt_len - 1, prompt_len))
    spans = [*[decode] * num_decodes, prompt]
    times = []
    for _ in range(sizes.repeats + 2):
        begin = time.perf_counter()
        runner.run(spans)
        launched = time.perf_counter()
        wait_for(bench.device)
        times.append((launched - begin, time.perf_counter() - begin))
    host_s, step_s = (median(each) for each in zip(*times[2:], strict=True))
    profiler, text = cProfile.Profile(), io.StringIO()
    for _ in range(10):
        profiler.runcall(runner.run, spans)
        wait_for(bench.device)
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(60)
    path = bench.folder / "queued.txt"
    path.write_text(text.getvalue(), encoding="utf-8")
    row = {"part": "queued", "decodes": num_decodes, "tokens": prompt_len}
    yield {**row, "queueing_s": host_s, "step_s": step_s, "file": path.name}


def profile(bench: Bench) -> Iterator[Row]:
    """Write tables of the kernels of some decode steps, by torch's profiler."""
    sizes = bench.sizes
    is_gpu = bench.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    every = _ExperimentalConfig(profile_all_threads=True)  # steps run on the engine's thread
    with ExitStack() as stack:
        engine = bench.engine(stack, max(sizes.batches))
        for count in sizes.batches[:2]:
            prompts = bench.prompts.of(sizes.prompt_len, count)
            engine.serve(prompts, WARM_UP_LEN)
            with torch.profiler.profile(
                activities=[activity], experimental_config=every
            ) as profiled:
                # The prefix cache has the prompts, so nearly all steps decode.
                engine.serve(prompts, _PROFILED_LEN)
            order = "self_device_time_total" if is_gpu else "self_cpu_time_total"
            path = bench.folder / f"profile_{count}.txt"
            text = profiled.key_averages().table(sort_by=order, row_limit=60)
            path.write_text(text, encoding="utf-8")
            yield {"part": "profile", "sequences": count, "file": path.name}


def memory(bench: Bench) -> Iterator[Row]:
    """Compare what the profile of memory told with what an engine holds after ordinary work."""
    if bench.device.type != "cuda":
        yield left_out("memory", "torch counts a GPU's memory only")
        return
    sizes = bench.sizes
    config = sizes.config(sizes.chunk_len, max(sizes.batches))
    profiles = [tier.profile for tier in bench.deployment.own_tiers]
    meter = CudaMeter(bench.device)
    told = profile_memory(bench.checkpoint, config, profiles, _SHARE, meter)
    cache_bytes = sizes.cache_tokens * bench.checkpoint.cache_layout(1, "auto").token_bytes
    meter.reset()
    with ExitStack() as stack:
        engine = bench.engine(stack, max(sizes.batches))
        for num_tokens, count in sizes.bursts:
            engine.serve(bench.prompts.of(num_tokens, count), WARM_UP_LEN, top_p=0.9, temperature=1)
        engine.serve(bench.prompts.of(sizes.prefill_len), WARM_UP_LEN)
        held = meter.read()
    yield {
        "part": "memory",
        "told_bytes": told.weight_bytes + told.step_bytes + told.graph_bytes + cache_bytes,
        "peak_bytes": held.peak,
        "told_outside_bytes": told.outside_bytes,
        "outside_bytes": held.outside,
    }


PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode,
    "prefill": prefill,
    "bursts": bursts,
    "arrivals": arrivals,
    "short_prompts": short_prompts,
    "sampling": sampling,
    "drafts": drafts,
    "growth": growth,
    "windows": windows,
    "few_bits": few_bits,
    "queued": queued,
    "profile": profile,
    "memory": memory,
    "server": server,
    "contenders": contenders,
    "compiled": compiled,
}
