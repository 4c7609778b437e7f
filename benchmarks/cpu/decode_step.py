"""`python -m benchmarks.cpu.decode_step FILE.gguf...`: a decode step of one call beside others.

A file is loaded as `ropewalk serve` loads it on a CPU. Both forwards have the same weights,
products and bits. They take turns, step by step, because the speed of a machine changes within
minutes. A step has one row, after a prompt of 128 tokens.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers, restore
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

_CONTEXT = 128  # tokens before the decoded one
_PAGE = 64


def step_times(path: Path, num_threads: int, rounds: int) -> tuple[float, float]:
    """Return the median times of a step in seconds, of the model's own forward and of one call."""
    torch.set_num_threads(num_threads)
    loaded = load_checkpoint(path)
    model: Any = loaded.model
    fused = vars(model).get("forward")
    if not isinstance(fused, DecoderLayers):
        raise click.ClickException(f"{path.name} keeps its own forward")
    config = EngineConfig(
        kv_cache_tokens=1024, max_model_len=512, page_size=_PAGE, num_state_slots=1
    )
    runner = build_runner(loaded, config)
    native = loaded.native
    table = runner.table_id(Profile(native.tables[native.scaled_layer_type].scaling))

    def span(first: int, end: int) -> list[Span]:
        ids = [7 + (5 * at) % 200 for at in range(first, end)]
        parts = (StatePart(len(ids), 0 if first else None, 0),) if loaded.states else ()
        return [Span(ids, first, range(8), table, range(end - first - 1, end - first), parts)]

    def timed(*, is_fused: bool) -> float:
        restore(model)
        if is_fused:
            model.forward = fused
        began = time.perf_counter()
        runner.run(span(_CONTEXT, _CONTEXT + 1))
        return time.perf_counter() - began

    runner.run(span(0, _CONTEXT))
    pairs = [(timed(is_fused=False), timed(is_fused=True)) for _ in range(rounds)]
    own, one_call = (statistics.median(each) for each in zip(*pairs[2:], strict=True))
    return own, one_call


def table(rows: Sequence[tuple[str, int, float, float]]) -> str:
    """Return the table of the results, in Markdown."""
    lines = [
        "| file | threads | own forward, ms | one call, ms | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {threads} | {1e3 * own:.2f} | {1e3 * fused:.2f} | **{own / fused:.2f}** |"
        for name, threads, own, fused in rows
    ]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--threads", default="1,2", show_default=True, help="Numbers of threads.")
@click.option("--rounds", default=60, show_default=True, type=click.IntRange(5), help="Steps.")
def main(files: tuple[Path, ...], threads: str, rounds: int) -> None:
    """Time steps of both forwards in turns, and print their medians."""
    counts = [int(each) for each in threads.split(",")]
    rows = [
        (path.name, count, *step_times(path, count, rounds)) for path in files for count in counts
    ]
    click.echo(table(rows))


if __name__ == "__main__":
    main()
