"""The parts of the whole-model benchmark that measure decoding, prompts and growth."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from benchmarks.gpu_bench import OURS, Bench, Row, left_out
from benchmarks.gpu_engine import Measured, free_memory
from benchmarks.gpu_needs import lacks_to_serve
from benchmarks.gpu_served_parts import (
    arrivals,
    bursts,
    drafts,
    few_bits,
    memory,
    profile,
    queued,
    sampling,
    short_prompts,
    windows,
)
from benchmarks.gpu_server import ServerError, serve_and_load


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
    command = [sys.executable, "-m", "benchmarks.gpu_contenders", name, str(batch), str(path)]
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
