"""`python -m benchmarks.kv_value_steps MODEL`: other ways to hold values in four bits.

Pages of an exact cache are replaced by what a format would read, each after its own step. So a
query sees earlier pages sealed and its own page exact. Keys have eight bits by channel, or four by
half of a channel.

Shapes: K = key heads, O = offsets in a page, V = value dimensions, D = key dimensions, R = scored
rows.
"""

from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.kv_cache import Held, held
from ropewalk.model_runtime.attention.sealed.page_format import EXACT, key_parts
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.server.corpus.held_out import library_documents

_PAGE, _GROUP, _FIRST = 64, 32, 4
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the range of a row

Seal = Callable[[Tensor, int], Tensor]  # values [K, O, V] and the page's number, as they are read


def rows(numbers: Tensor, bits: int, share: float = 1.0) -> Tensor:
    """Return what rows, the last dimension, are read as; `share` of their range has codes."""
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    low, high = low + (high - low) * (1 - share) / 2, high - (high - low) * (1 - share) / 2
    low = low.half().float()
    step = ((high - low) / (2**bits - 1)).clamp(2**-14).half().float()
    found: Tensor = ((numbers - low) / step).round().clamp(0, 2**bits - 1) * step + low
    return found


def least_squares(numbers: Tensor) -> Tensor:
    """Return the rows with the share of the range that has the least squared error."""
    found = torch.stack([rows(numbers, 4, share) for share in _SHARES])
    best = (found - numbers).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return found.gather(0, best.expand(1, *numbers.shape))[0]


def groups(value_KOV: Tensor, size: int = _GROUP) -> Tensor:
    """Return values with a step for each group of dimensions, or for all if they are no groups."""
    size = size if value_KOV.shape[-1] % size == 0 else value_KOV.shape[-1]
    return rows(value_KOV.reshape(*value_KOV.shape[:2], -1, size), 4).flatten(-2)


def first_in_eight(seal: Callable[[Tensor], Tensor]) -> Seal:
    """Return a format whose first tokens of a page have eight bits."""
    return lambda value_KOV, _: torch.cat(
        (rows(value_KOV[:, :_FIRST], 8), seal(value_KOV[:, _FIRST:])), 1
    )


WAYS: dict[str, Seal] = {
    "a step for each token": lambda value_KOV, _: rows(value_KOV, 4),
    "the first page exact": lambda value_KOV, page: rows(value_KOV, 4) if page else value_KOV,
    "the first tokens in eight bits": first_in_eight(lambda value_KOV: rows(value_KOV, 4)),
    "least squares": lambda value_KOV, _: least_squares(value_KOV),
    "by channel": lambda value_KOV, _: rows(value_KOV.mT, 4).mT,
    "by 64 dimensions": lambda value_KOV, _: groups(value_KOV, 2 * _GROUP),
    "by 32 dimensions": lambda value_KOV, _: groups(value_KOV),
    "the same, the first tokens in eight bits": first_in_eight(groups),
}


def scored(
    cache: Held, token_ids: list[int], num_rows: int, seal: Seal | None, bits: int
) -> Tensor:
    """Return the logprobs of the last rows, float64 [R, ...]."""
    begin, found = len(token_ids) - num_rows, []
    for first in range(0, len(token_ids), _PAGE):
        chunk = token_ids[first : first + _PAGE]
        num = min(len(chunk), max(0, first + len(chunk) - begin))
        logits = cache.runner.run([cache.span(chunk, first, max(1, num))])
        found.append(logits[len(logits) - num :].clone())
        if seal is None or len(chunk) < _PAGE:
            continue
        page = cache.pages[first // _PAGE]
        for layer in cache.runner.store.arrays:
            keys_NKDO, values_NKOV = cache.runner.store.pages(layer)
            halves = keys_NKDO[page].chunk(key_parts(bits), -1)
            keys_NKDO[page] = torch.cat([rows(each, bits) for each in halves], -1)
            values_NKOV[page] = seal(values_NKOV[page], first // _PAGE)
    return torch.cat(found).double().log_softmax(-1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=1024, show_default=True, help="Of the text.")
@click.option("--scored-rows", default=256, show_default=True, help="Tokens at its end.")
@click.option("--key-bits", default=8, show_default=True)
@torch.inference_mode()
def main(model: Path, tokens: int, scored_rows: int, key_bits: int) -> None:
    """Print the KL of each way against the exact cache, on a CPU."""
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(model, device="cpu")
    text = "\n".join(each.text for each in library_documents(held_out=True))[: 8 * tokens]
    ids = list(checkpoint.tokenizer.encode(text, add_special_tokens=True, param="text"))[:tokens]
    cache = held(checkpoint, EXACT, tokens + _PAGE)
    exact = scored(cache, ids, scored_rows, None, key_bits)
    click.echo("| values | KL |\n|---|---:|")
    for name, seal in WAYS.items():
        found = scored(cache, ids, scored_rows, seal, key_bits)
        kl = float((exact.exp() * (exact - found)).sum(-1).mean())
        click.echo(f"| {name} | {kl:.5f} |")


if __name__ == "__main__":
    main()
