"""`python -m tests.smallest_errors`: which errors of a patched model the self-check finds.

Each error is put into the attention of a tiny random model, between the model and the cache: a
scale or a table that is off by a share, a window that is one token too long, the other order of
pairs. The page prints the smallest share that is found, and in how many architectures an error of
one percent, of the window and of the pairs is found.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import click
import structlog
import torch

from ropewalk.model_runtime.attention.paged_attention import AttentionCall, PagedContext
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading import checkpoint
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.tokens import byte_tokenizer
from tests.models_page import SERVED

SHARES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001)


@contextmanager
def _changed_calls(change: Callable[[AttentionCall], AttentionCall]) -> Iterator[None]:
    attend = PagedContext.attend

    def changed(step: PagedContext, layer_idx: int, call: AttentionCall) -> Any:
        return attend(step, layer_idx, change(call))

    with patch.object(PagedContext, "attend", changed):
        yield


def scale(share: float) -> Any:
    """Attention's logits are larger by a share."""
    return _changed_calls(lambda call: replace(call, scaling=call.scaling * (1 + share)))


def table(share: float) -> Any:
    """The frequencies are larger by a share."""
    frequencies = RopeTables._frequencies

    def changed(tables: RopeTables, *arguments: Any) -> Any:
        found = frequencies(tables, *arguments)
        return replace(found, inv_freq_P=found.inv_freq_P * (1 + share))

    return patch.object(RopeTables, "_frequencies", changed)


def window(_: float) -> Any:
    """A window sees one token too many."""

    def wider(call: AttentionCall) -> AttentionCall:
        seen = call.sliding_window
        return call if seen is None else replace(call, sliding_window=seen + 1)

    return _changed_calls(wider)


def pairs(_: float) -> Any:
    """Pairs are taken in the other order."""
    original = checkpoint.patch_model

    def swapped(*arguments: Any) -> Any:
        plans = original(*arguments)
        return {
            index: plan
            if plan.layer_type is None
            else replace(plan, interleaved=not plan.interleaved)
            for index, plan in plans.items()
        }

    return patch.object(checkpoint, "patch_model", swapped)


def is_found(architecture: str, dtype: torch.dtype, error: Any) -> bool:
    """Whether a load with the error is refused."""
    model = in_dtype(tiny_model(architecture), dtype)
    try:
        with error:
            checkpoint.prepare_model(model, byte_tokenizer(), frozenset(), {})
    except ModelError:
        return True
    return False


def smallest(architecture: str, dtype: torch.dtype, error: Callable[[float], Any]) -> float | None:
    """The smallest share that is found, of those that are tried; None if none is."""
    found = None
    for share in SHARES:
        if not is_found(architecture, dtype, error(share)):
            break
        found = share
    return found


@click.command()
@click.option("--architectures", default=",".join(SERVED))
@click.option("--smallest-of", default="", help="Architectures whose smallest errors are found.")
def main(architectures: str, smallest_of: str) -> None:
    """Print what is found."""
    warnings.simplefilter("ignore")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for dtype in (torch.float32, torch.bfloat16):
        for name in filter(None, smallest_of.split(",")):
            shares = [smallest(name, dtype, each) for each in (scale, table)]
            click.echo(f"{name} {dtype}: scale {shares[0]}, table {shares[1]}")
        for error in (scale, table, window, pairs):
            missed = [
                name for name in architectures.split(",") if not is_found(name, dtype, error(0.01))
            ]
            click.echo(f"{dtype} {error.__name__}: missed in {len(missed)}: {' '.join(missed)}")


if __name__ == "__main__":
    main()
