"""`python -m benchmarks.kv_turns MODEL --peer PYTHON`: decode steps beside llama.cpp, in turns.

Each round times one step of each cache type here and there, by the clock, at the end of one long
context. PYTHON has llama-cpp-python (`peer_kv_cache.py`); without it only our formats are timed.
With several sequences, each has the whole context. `--prompt` times the computation of the context
instead, in chunks, here alone.
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.kv_cache import held
from ropewalk.model_runtime.attention.sealed.page_format import EXACT, FORMATS, ROUNDED
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint

_PEER = Path(__file__).parent / "peer_kv_cache.py"
_PEER_TYPES = ("f32", "f16", "q8_0", "q4_0")


class Peer:
    """A process of llama.cpp that answers with the time of a step."""

    def __init__(self, python: str, model: Path, context: int, num_threads: int) -> None:
        command = [python, str(_PEER), str(model), "turns", str(context), str(num_threads)]
        self._process = subprocess.Popen(  # noqa: S603  # the user names it
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self, kind: str) -> float:
        """Return the milliseconds of a step."""
        given, told = self._process.stdin, self._process.stdout
        assert given is not None
        assert told is not None
        given.write(f"{kind}\n")
        given.flush()
        return float(told.readline())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def timed(work: Callable[[], None]) -> float:
    """Return the milliseconds of a call."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--peer", help="A Python that has llama-cpp-python.")
@click.option("--formats", default=",".join((EXACT, ROUNDED, *FORMATS)), show_default=True)
@click.option("--context", default=32768, show_default=True)
@click.option("--sequences", default=1, show_default=True, help="In a step; the peer has one.")
@click.option("--prompt", is_flag=True, help="Time a prompt of CONTEXT tokens, not a step.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@torch.inference_mode()
def main(  # noqa: PLR0917
    model: Path, peer: str | None, formats: str, context: int, sequences: int, prompt: bool,  # noqa: FBT001
    threads: int, rounds: int,
) -> None:  # fmt: skip
    """Time decode steps or prompts of a GGUF file on a CPU."""
    if prompt and (peer or sequences > 1):
        raise click.UsageError("--prompt times one sequence, and no peer")
    torch.set_num_threads(threads)
    checkpoint = load_checkpoint(model, device="cpu")
    works: dict[str, Callable[[], float]] = {}
    for kind in formats.split(","):
        cache = held(checkpoint, kind, context, sequences)
        cache.fill()
        timed_call = cache.prompt if prompt else cache.decode
        works[kind] = partial(timed, partial(timed_call, context))
    other = Peer(peer, model, context, threads) if peer else None
    if other:
        works |= {f"llama.cpp {kind}": partial(other.step, kind) for kind in _PEER_TYPES}
    times: dict[str, list[float]] = {name: [] for name in works}
    for attempt in range(rounds + 1):
        for name, work in works.items():
            taken = work()
            if attempt:
                times[name].append(taken)
    if other:
        other.end()
    click.echo(f"\n{sequences} x {context} tokens, {threads} threads.\n")
    click.echo(
        f"| cache | ms a {'prompt' if prompt else 'step'} | rate, of that of the first row "
        "| lowest to highest |"
    )
    click.echo("|---|---:|---:|---:|")
    first = next(iter(times.values()))
    for name, found in times.items():
        ratios = [a / b for a, b in zip(first, found, strict=True)]
        click.echo(
            f"| {name} | {statistics.median(found):.1f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
