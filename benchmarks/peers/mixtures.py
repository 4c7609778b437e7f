"""`python -m benchmarks.peers.mixtures FILE.gguf... --peer PYTHON`: mixtures beside llama.cpp.

Both compute the same steps of the same file, in turns and without a server. `PYTHON` is that of an
environment with llama-cpp-python (`mixture_steps.py`). A cell is the median of three rounds, and a
ratio is the median of the rounds' ratios. The floor of one row is the time to read its weights, at
a rate of the same run.
"""

import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from benchmarks.cpu.kernels import measured_rates
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.rope import Profile

_CONTEXT, _AT_ONCE, _PAGE = 128, 512, 64  # tokens: before a decoded one, of a step, of a page
_DECODING, _MOST_PROMPT = 8, 2048  # sequences; tokens
_ROUNDS = 3
_STEPS = {"rows 1": 12, "rows 8": 6, "prompt 512": 1, "prompt 2048": 1}  # of a round
KINDS = tuple(_STEPS)


class Cell(NamedTuple):
    """A kind of step: the rounds of ours and of llama.cpp, in seconds, and the floor."""

    file: str
    activations: str
    kind: str
    threads: int
    ours: list[float]
    theirs: list[float]
    floor: float | None

    def row(self) -> str:
        """Return the row of the table."""
        count = int(self.kind.split()[1])
        rates = [count / statistics.median(each) for each in (self.ours, self.theirs)]
        ratio = statistics.median(b / a for a, b in zip(self.ours, self.theirs, strict=True))
        share = f"{100 * self.floor / statistics.median(self.ours):.0f} %" if self.floor else ""
        return (
            f"| {self.file} | {self.activations} | {self.kind} | {self.threads} | {rates[0]:.1f} | "
            f"{rates[1]:.1f} | **{ratio:.2f}** | {share} |"
        )


class _Ours:
    """A loaded mixture with its decoding sequences."""

    def __init__(self, path: Path, activations: Any) -> None:
        loaded = load_checkpoint(path, activations=activations)
        forward = vars(loaded.model).get("forward")
        if not isinstance(forward, DecoderLayers) or not forward.has_head:
            raise click.ClickException(f"{path.name} has no step of one call")
        self.read_bytes = forward.read_bytes
        self._pages = -(-(_CONTEXT + 1) // _PAGE)
        num_pages = _DECODING * self._pages + _MOST_PROMPT // _PAGE
        config = EngineConfig(
            kv_cache_tokens=num_pages * _PAGE, max_model_len=_MOST_PROMPT, page_size=_PAGE
        )
        self._runner = build_runner(loaded, config)
        table = loaded.native.tables[loaded.native.scaled_layer_type]
        self._table_id = self._runner.table_id(Profile(table.scaling))
        self._runner.run([self._span(each, 0, _CONTEXT) for each in range(_DECODING)])

    def _span(self, sequence: int, first: int, count: int, num_last: int = 1) -> Span:
        ids = [7 + (5 * at + 31 * sequence) % 200 for at in range(first, first + count)]
        begin = sequence * self._pages
        num_pages = self._pages if sequence < _DECODING else _MOST_PROMPT // _PAGE
        last = range(count - num_last, count)
        return Span(ids, first, range(begin, begin + num_pages), self._table_id, last)

    def step(self, kind: str, threads: int) -> float:
        """Compute a step of some rows, or a prompt; return seconds."""
        torch.set_num_threads(threads)
        what, count = kind.split()
        if what == "rows":
            steps = [[self._span(each, _CONTEXT, 1) for each in range(int(count))]]
        else:
            firsts = range(0, int(count), _AT_ONCE)
            steps = [
                [self._span(_DECODING, first, _AT_ONCE, int(first == firsts[-1]))]
                for first in firsts
            ]
        began = time.perf_counter()
        for spans in steps:
            self._runner.run(spans)
        return time.perf_counter() - began


class _Theirs:
    """llama.cpp in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"llama.cpp ended with {self._process.wait(60)}")
        return line

    def step(self, kind: str, threads: int) -> float:
        """Compute a step; return the seconds that it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{threads} {kind}\n")
        self._process.stdin.flush()
        return float(self._answer())


@contextmanager
def _theirs(peer: Path, path: Path) -> Iterator[_Theirs]:
    command = [str(peer), str(Path(__file__).with_name("mixture_steps.py")), str(path)]
    with subprocess.Popen(  # noqa: S603  # our own command
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield _Theirs(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the end of its input ends it
            process.wait(60)


def _cells(
    path: Path, peer: Path, activations: Sequence[str], kinds: Sequence[str], threads: Sequence[int]
) -> Iterator[Cell]:
    """Measure a file; yield each cell."""
    torch.set_num_threads(max(threads))
    ours = {each: _Ours(path, each) for each in activations}
    with _theirs(peer, path) as theirs:
        sides: dict[str, _Ours | _Theirs] = {**ours, "llama.cpp": theirs}
        for count in threads:
            torch.set_num_threads(count)
            rate = measured_rates(count).read_bytes
            for kind in kinds:
                rounds: dict[str, list[float]] = {name: [] for name in sides}
                for attempt in range(_ROUNDS + (kind != "prompt 2048")):
                    for name, side in sides.items():
                        took = [side.step(kind, count) for _ in range(_STEPS[kind])]
                        if attempt or kind == "prompt 2048":  # 512 tokens have warmed it up
                            rounds[name].append(statistics.median(took))
                for name, own in ours.items():
                    floor = own.read_bytes / rate if kind == "rows 1" else None
                    found = rounds[name], rounds["llama.cpp"]
                    yield Cell(path.stem, name, kind, count, *found, floor)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--peer", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--activations", default="exact,int8", show_default=True, help="Of ours.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Steps.")
@click.option("--threads", default="1,2", show_default=True, help="Numbers of threads.")
def main(files: tuple[Path, ...], peer: Path, activations: str, kinds: str, threads: str) -> None:
    """Time the steps of files here and in llama.cpp, in turns."""
    if unknown := set(kinds.split(",")) - set(KINDS):
        raise click.UsageError(f"--kinds must be of {', '.join(KINDS)}. Given: {min(unknown)}")
    click.echo("| file | activations | step | threads | tokens/s | llama.cpp | ratio | floor |")
    click.echo("|---|---|---|---:|---:|---:|---:|---:|")
    counts = list(map(int, threads.split(",")))
    for path in files:
        for cell in _cells(path, peer, activations.split(","), kinds.split(","), counts):
            click.echo(cell.row())


if __name__ == "__main__":
    main()
