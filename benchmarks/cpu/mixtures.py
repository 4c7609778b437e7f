"""`python -m benchmarks.cpu.mixtures FILE.gguf...`: steps of a mixture, by three forwards in turns.

`torch between` is the model's own forward, whose blocks choose experts by calls of torch. `own
forward` has compiled blocks. `one call` is the whole step in one call. All three have the same
weights and kernels of experts. Steps take turns, because the speed of a machine changes within
minutes. The floor of one row is the time to read its weights at a rate of the same run.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from benchmarks.cpu.kernels import measured_rates
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.experts.mixture import Mixture
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers, restore
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.rope import Profile

_CONTEXT, _PROMPT = 128, 512  # tokens before a decoded one; tokens of a prompt
_PAGE, _PAGES = 64, 16
FORWARDS = ("torch between", "own forward", "one call")


class Row(NamedTuple):
    """The median seconds of a kind of step, by forward, and those of reading its weights."""

    kind: str
    num_tokens: int
    num_threads: int
    took: dict[str, float]
    floor: float | None


class _Steps:
    """A loaded mixture and the steps that are timed."""

    def __init__(self, path: Path) -> None:
        loaded = load_checkpoint(path)
        self.model: Any = loaded.model
        fused = vars(self.model).get("forward")
        if not isinstance(fused, DecoderLayers):
            raise click.ClickException(f"{path.name} keeps its own forward")
        if not fused.has_head:  # the floor would lack its bytes
            raise click.ClickException(f"{path.name} has a head of other numbers than its layers")
        self.fused = fused
        forwards = ((block, vars(block).get("forward")) for block in self.model.modules())
        self.blocks = [(block, each) for block, each in forwards if isinstance(each, Mixture)]
        tokens = 9 * _PAGES * _PAGE
        config = EngineConfig(kv_cache_tokens=tokens, max_model_len=1024, page_size=_PAGE)
        self.runner = build_runner(loaded, config)
        table = loaded.native.tables[loaded.native.scaled_layer_type]
        self.table_id = self.runner.table_id(Profile(table.scaling))

    def use(self, forward: str) -> None:
        """Let the model compute by one of FORWARDS."""
        restore(self.model)
        for block, mixture in self.blocks:
            block.forward = mixture.ruled if forward == FORWARDS[0] else mixture
        if forward == FORWARDS[2]:
            self.model.forward = self.fused

    def span(self, sequence: int, first: int, count: int) -> Span:
        """Return a span whose last token has logits; sequences have other tokens."""
        ids = [7 + (5 * at + 31 * sequence) % 200 for at in range(first, first + count)]
        pages = range(sequence * _PAGES, (sequence + 1) * _PAGES)
        return Span(ids, first, pages, self.table_id, range(count - 1, count))

    def kinds(self) -> dict[str, list[Span]]:
        """Return the steps by name."""
        return {
            "1 row": [self.span(0, _CONTEXT, 1)],
            "8 rows": [self.span(each, _CONTEXT, 1) for each in range(8)],
            "prompt": [self.span(8, 0, _PROMPT)],
        }


def rows_of(path: Path, num_threads: int, rounds: int) -> list[Row]:
    """Measure all kinds of steps of a file."""
    torch.set_num_threads(num_threads)
    steps, rate = _Steps(path), measured_rates(num_threads).read_bytes
    steps.runner.run([steps.span(each, 0, _CONTEXT) for each in range(8)])
    found = []
    for kind, spans in steps.kinds().items():
        times: dict[str, list[float]] = {each: [] for each in FORWARDS}
        for attempt in range(2 + (rounds if kind != "prompt" else max(3, rounds // 10))):
            for forward in FORWARDS:
                steps.use(forward)
                began = time.perf_counter()
                steps.runner.run(spans)
                if attempt > 1:
                    times[forward].append(time.perf_counter() - began)
        took = {each: statistics.median(some) for each, some in times.items()}
        floor = steps.fused.read_bytes / rate if kind == "1 row" else None
        num_tokens = sum(len(each.token_ids) for each in spans)
        found.append(Row(kind, num_tokens, num_threads, took, floor))
    return found


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the table of the results, in Markdown."""
    lines = [
        "| file | step | threads | torch between, tok/s | own forward | one call | times | floor |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows:
        rates = {each: row.num_tokens / took for each, took in row.took.items()}
        first, _, last = FORWARDS
        share = "" if row.floor is None else f"{100 * row.floor / row.took[last]:.0f} %"
        cells = [f"{rates[each]:.1f}" for each in FORWARDS]
        cells += [f"**{rates[last] / rates[first]:.2f}**", share]
        lines.append(f"| {name} | {row.kind} | {row.num_threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--threads", default="1,2", show_default=True, help="Numbers of threads.")
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(3), help="Steps.")
def main(files: tuple[Path, ...], threads: str, rounds: int) -> None:
    """Time steps of three forwards in turns, and print their tokens in a second."""
    rows = []
    for path in files:
        for count in map(int, threads.split(",")):
            rows += [(path.name, row) for row in rows_of(path, count, rounds)]
    click.echo(table(rows))


if __name__ == "__main__":
    main()
