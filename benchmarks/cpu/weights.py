"""`python -m benchmarks.cpu.weights MODEL`: steps of a model with weights stored in several ways.

All ways are loaded into one process with one thread, and take turns. A time is the processor time
of the thread, so other work on the machine changes it less than the clock's. There is no server
around the steps.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.cpu.kernels import READ_BYTES, sum_of
from benchmarks.models.few_bits import load_made
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE, INT8
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.packed_linear import products_of
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile

_PAGE = 64
_CONTEXT = 128  # tokens before a decoded one
_PROMPT, _CHUNK = 2048, 512
_BATCH = 8
# name -> number type and setting `weights`
_WAYS = {
    "float32": ("float32", "dequantised"),
    "bfloat16": ("bfloat16", "dequantised"),
    "stored": ("float32", "stored"),
    "int8": ("float32", "int8"),
    "int8-bfloat16": ("bfloat16", "int8"),
}
# Random weights of a format, in the place of the model's own.
_MADE = {kind.name: kind for kind in BY_TYPE.values() if kind is not INT8}
_READING = "reading"
_ROOFLINE = "float32,bfloat16,int8,Q4_1,Q4_K,Q6_K"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights stored in one way."""

    runner: ModelRunner
    table_id: int
    weight_bytes: int
    step_bytes: int  # that a step of one sequence reads

    def span(self, num_tokens: int, first: int, sequence: int) -> Span:
        """Return tokens of a sequence from position `first` on; the last one has logits."""
        per_sequence = _PROMPT // _PAGE
        pages = range(sequence * per_sequence, (sequence + 1) * per_sequence)
        token_ids = [7 + (5 * at) % 200 for at in range(num_tokens)]
        return Span(token_ids, first, pages, self.table_id, range(num_tokens - 1, num_tokens))

    def decode(self, num_sequences: int) -> None:
        self.runner.run([self.span(1, _CONTEXT, each) for each in range(num_sequences)])

    def prefill(self) -> None:
        for first in range(0, _PROMPT, _CHUNK):
            self.runner.run([self.span(_CHUNK, first, 0)])


def load(model: Path, way: str) -> Loaded:
    """Load a model with its weights in one way."""
    dtype, weights = _WAYS.get(way, ("float32", "stored"))
    if way in _MADE:
        checkpoint = load_made(model, _MADE[way])
    else:
        checkpoint = load_checkpoint(model, dtype=dtype, device="cpu", weights=weights)  # type: ignore[arg-type]
    if checkpoint.distance is not None:
        click.echo(f"{way}: {checkpoint.distance}")
    config = EngineConfig(kv_cache_tokens=_BATCH * _PROMPT, max_model_len=_PROMPT, page_size=_PAGE)
    runner = build_runner(checkpoint, config)
    native = checkpoint.native
    table_id = runner.table_id(Profile(native.tables[native.scaled_layer_type].scaling))
    panels = [each._panels for each in products_of(checkpoint.model)]  # noqa: SLF001
    read = sum(each.num_bytes for each in panels if each is not None)
    if checkpoint.low_bits is not None:
        num_bytes = checkpoint.low_bits.num_bytes
    else:
        floats = checkpoint.model.parameters()
        num_bytes = read + sum(each.nbytes for each in floats if each.device.type == "cpu")
    context = _CONTEXT * checkpoint.cache_layout(_PAGE, "auto").token_bytes
    return Loaded(runner, table_id, num_bytes, read + context)


def times_of(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the processor times of each work by round, in ms; the works take turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for attempt in range(rounds + 1):
        for name, work in works.items():
            begin = time.thread_time()
            work()
            if attempt:
                found[name].append(1e3 * (time.thread_time() - begin))
    return found


def roofline(loaded: dict[str, Loaded], rounds: int) -> None:
    """Print the time of a step of one sequence beside the time that reading its bytes takes."""
    numbers = np.ones(READ_BYTES // 4, np.float32)
    works: dict[str, Callable[[], None]] = {
        name: partial(each.decode, 1) for name, each in loaded.items()
    }
    found = times_of({_READING: partial(sum_of, numbers), **works}, rounds)
    rates = [READ_BYTES / (1e-3 * each) for each in found.pop(_READING)]
    click.echo(f"\nOne thread reads {statistics.median(rates) / 1e9:.1f} GB/s.\n")
    click.echo("| weights | MiB a step | ms to read them | ms of a step | share |")
    click.echo("|---|---:|---:|---:|---:|")
    for name, times in found.items():
        size = loaded[name].step_bytes
        reading = [1e3 * size / rate for rate in rates]
        shares = [a / b for a, b in zip(reading, times, strict=True)]
        click.echo(
            f"| {name} | {size / 2**20:.0f} | {statistics.median(reading):.1f} "
            f"| {statistics.median(times):.1f} | {statistics.median(shares):.0%} |"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--ways", default=None, help=f"Of {', '.join((*_WAYS, *_MADE))}.")
@click.option(
    "--rounds",
    default=30,
    show_default=True,
    help="Rounds of a decode step; a prompt has a tenth of them.",
)
@click.option("--roofline", "is_roofline", is_flag=True, help="One step beside reading its bytes.")
@torch.inference_mode()
def main(model: Path, ways: str | None, rounds: int, *, is_roofline: bool) -> None:
    """Measure steps of a folder or GGUF file; ratios are against the first way.

    Ways with a type's name have random weights of this type. They need a folder.
    """
    names = (ways or (_ROOFLINE if is_roofline else "float32,bfloat16,int8")).split(",")
    unknown = sorted(set(names) - {*_WAYS, *_MADE})
    if unknown:
        raise click.BadParameter(
            f"--ways: has {unknown[0]}, known are {', '.join((*_WAYS, *_MADE))}"
        )
    made = sorted(set(names) & set(_MADE))
    if made and model.is_file():
        raise click.BadParameter(f"--ways: {made[0]} needs a folder, and {model} is a file")
    torch.set_num_threads(1)
    loaded = {name: load(model, name) for name in names}
    if is_roofline:
        roofline(loaded, rounds)
        return
    steps: dict[str, tuple[int, Callable[[Loaded], None]]] = {
        "decode, 1 sequence": (rounds, lambda each: each.decode(1)),
        f"decode, {_BATCH} sequences": (rounds, lambda each: each.decode(_BATCH)),
        f"prompt of {_PROMPT}": (max(1, rounds // 10), lambda each: each.prefill()),
    }
    click.echo("\n| step | weights | ms | times as fast | lowest to highest |")
    click.echo("|---|---|---:|---:|---:|")
    for what, (num, step) in steps.items():
        found = times_of({name: partial(step, each) for name, each in loaded.items()}, num)
        base = found[names[0]]
        for name in names:
            ratios = [a / b for a, b in zip(base, found[name], strict=True)]
            between = f"{min(ratios):.2f} to {max(ratios):.2f}"
            median = statistics.median(found[name])
            click.echo(
                f"| {what} | {name} | {median:.2f} | {statistics.median(ratios):.2f} | {between} |"
            )
    sizes = ", ".join(
        f"{name} {each.weight_bytes / 2**20:.0f} MiB" for name, each in loaded.items()
    )
    click.echo(f"\nMemory of weights: {sizes}.")


if __name__ == "__main__":
    main()
