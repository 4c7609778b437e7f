"""`python -m benchmarks.cache.kv_cache MODEL`: a cache in other numbers beside the exact one.

Quality: the logits of a held-out text's last tokens, with every page before them in the format.
Beyond the trained length L, the table is YaRN's of the smallest power of two that covers the text.
Rate: a decode step at a long context. Its pages are copies of one that was computed, in shuffled
places, because a step takes as long for any numbers. All formats are in one process with one
thread, and take turns. A time is the processor time of the thread.

Shapes: R = scored rows, V = vocabulary.
"""

import ctypes
import gc
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu.weights import times_of
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.quantised.page_format import (
    EXACT,
    FIXED8,
    FORMATS,
    ROUNDED,
)
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile, Yarn
from ropewalk.server.corpus.held_out import library_documents

_PAGE = 64
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Held:
    """A model over a cache in one format."""

    runner: ModelRunner
    table_id: int
    pages: list[int]  # in shuffled order

    def span(self, token_ids: list[int], first: int, num_rows: int) -> Span:
        """Return tokens of which the last rows have logits."""
        rows = range(len(token_ids) - num_rows, len(token_ids))
        return Span(token_ids, first, self.pages, self.table_id, rows)._replace(tail_page=0)

    def scored(self, token_ids: list[int], num_rows: int) -> Tensor:
        """Return the logprobs of the last rows, float64 [R, V]."""
        begin, found = len(token_ids) - num_rows, []
        for first in range(0, len(token_ids), _CHUNK):
            chunk = token_ids[first : first + _CHUNK]
            num = min(len(chunk), max(0, first + len(chunk) - begin))
            logits_RV = self.runner.run([self.span(chunk, first, max(1, num))])
            found.append(logits_RV[len(logits_RV) - num :])
        return torch.cat(found).double().log_softmax(-1)

    def fill(self) -> None:
        """Compute one page, and copy it to all."""
        self.runner.run([self.span(list(range(7, 7 + _PAGE)), 0, 1)])
        for memory in self.runner.store.page_memory():
            memory[:] = memory[self.pages[0]].copy()

    def decode(self, context: int) -> None:
        self.runner.run([self.span([9], context - 1, 1)])


def held(checkpoint: Checkpoint, kind: str, num_tokens: int) -> Held:
    """Build a cache for one sequence in a format over a loaded model.

    Beyond the trained length, the table is that of a tier of YaRN for the whole sequence.
    """
    room = -(-num_tokens // _PAGE) * _PAGE
    config = EngineConfig(
        kv_cache_tokens=room, max_model_len=room, page_size=_PAGE, kv_cache_dtype=kind,
        max_num_seqs=1,
    )  # fmt: skip
    runner = build_runner(checkpoint, config)
    native = checkpoint.native
    scaling = native.tables[native.scaled_layer_type].scaling
    if num_tokens > native.native_len:
        factor = 2.0 ** math.ceil(math.log2(num_tokens / native.native_len))
        scaling = Yarn(factor=factor, original_max_position_embeddings=native.native_len)
    table_id = runner.table_id(Profile(scaling))
    order = np.random.default_rng(0).permutation(config.num_pages)
    return Held(runner, table_id, order.tolist())


def quality(
    checkpoint: Checkpoint, kinds: list[str], num_tokens: int, num_rows: int, ids: Path | None
) -> None:
    """Print KL, its largest of a token, perplexity and top-1 of each format by the exact cache.

    `ids`: a file for the token ids, which `peers/kv_cache.py` reads.
    """
    text = "\n".join(each.text for each in library_documents(held_out=True))[: 8 * num_tokens]
    token_ids = checkpoint.tokenizer.encode(text, add_special_tokens=True, param="text")
    if len(token_ids) <= num_tokens:
        raise click.BadParameter(f"--tokens: the text has {len(token_ids)}, got {num_tokens}")
    known, next_R = token_ids[:num_tokens], torch.tensor(token_ids[: num_tokens + 1][-num_rows:])
    if ids is not None:
        ids.write_text("\n".join(map(str, token_ids[: num_tokens + 1])))
    exact_RV = held(checkpoint, EXACT, num_tokens).scored(known, num_rows)
    exact_loss = -float(exact_RV.gather(1, next_R[:, None]).mean())
    click.echo(f"\nThe last {num_rows} of {num_tokens} tokens.\n")
    click.echo("| format | bytes a token | KL | largest | perplexity | change | same top token |")
    click.echo("|---|---:|---:|---:|---:|---:|---:|")
    for kind in (EXACT, *kinds):
        logprobs_RV = exact_RV
        if kind != EXACT:
            logprobs_RV = held(checkpoint, kind, num_tokens).scored(known, num_rows)
        loss = -float(logprobs_RV.gather(1, next_R[:, None]).mean())
        kl_R = (exact_RV.exp() * (exact_RV - logprobs_RV)).sum(-1)
        same = float((exact_RV.argmax(-1) == logprobs_RV.argmax(-1)).double().mean())
        size = checkpoint.cache_layout(_PAGE, kind).token_bytes
        change = np.exp(loss - exact_loss) - 1
        click.echo(
            f"| {kind} | {size} | {kl_R.mean():.5f} | {kl_R.max():.4f} | {np.exp(loss):.3f} "
            f"| {change:+.2%} | {same:.1%} |"
        )


def rates(checkpoint: Checkpoint, kinds: list[str], contexts: list[int], rounds: int) -> None:
    """Print the time of a decode step of one sequence at each context."""
    click.echo("\n| context | format | ms a step | of the exact cache's rate | lowest to highest |")
    click.echo("|---:|---|---:|---:|---:|")
    for context in contexts:
        found: dict[str, Held] = {kind: held(checkpoint, kind, context) for kind in (EXACT, *kinds)}
        for each in found.values():
            each.fill()
        works: dict[str, Callable[[], None]] = {
            kind: partial(each.decode, context) for kind, each in found.items()
        }
        times = times_of(works, rounds)
        for kind in found:
            ratios = [a / b for a, b in zip(times[EXACT], times[kind], strict=True)]
            click.echo(
                f"| {context} | {kind} | {statistics.median(times[kind]):.1f} "
                f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
            )


def residents(checkpoint: Checkpoint, kinds: list[str], num_tokens: int) -> None:
    """Print by how much a full cache makes a process grow, beside the bytes that it counts."""
    click.echo("\n| format | MiB counted | MiB resident | more |\n|---|---:|---:|---:|")
    kept = []  # so that no cache takes memory that another one has left
    for kind in (EXACT, *kinds):
        kept.append(held(checkpoint, kind, 2 * _PAGE))
        kept[-1].fill()  # compiles, and makes the memory of a step
        before = _resident_bytes()
        cache = held(checkpoint, kind, num_tokens)
        cache.fill()
        kept.append(cache)
        counted, found = cache.runner.store.num_bytes, _resident_bytes() - before
        click.echo(
            f"| {kind} | {counted / 2**20:.1f} | {found / 2**20:.1f} | {found / counted - 1:+.1%} |"
        )


def _resident_bytes() -> int:
    """Return the resident memory of this process without what a load has left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    num_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _lengths(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if int(each)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--formats", default=",".join((ROUNDED, FIXED8, *FORMATS)), show_default=True)
@click.option("--tokens", default="2048", show_default=True, help="Of texts; 0: no quality.")
@click.option("--rows", default=256, show_default=True, help="Scored tokens at its end.")
@click.option(
    "--ids",
    type=click.Path(path_type=Path),
    help="A file for the tokens, for peers/kv_cache.py, of the last text.",
)
@click.option("--contexts", default="8192", show_default=True, help="Of decode steps; 0: none.")
@click.option("--rounds", default=10, show_default=True)
@click.option(
    "--resident", default=0, help="Tokens of full caches whose memory is measured; 0: none."
)
@torch.inference_mode()
def main(  # noqa: PLR0917
    model: Path,
    formats: str,
    tokens: str,
    rows: int,
    ids: Path | None,
    contexts: str,
    rounds: int,
    resident: int,
) -> None:
    """Measure a folder or GGUF file on a CPU."""
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(model, device="cpu")
    kinds = formats.split(",")
    for num_tokens in _lengths(tokens):
        quality(checkpoint, kinds, num_tokens, rows, ids)
    if lengths := _lengths(contexts):
        rates(checkpoint, kinds, lengths, rounds)
    if resident:
        residents(checkpoint, kinds, resident)


if __name__ == "__main__":
    main()
