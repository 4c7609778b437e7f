"""Choose the forward of a checked model: a pruned last layer and a fused decoder, if they agree.

Each of the two is installed, compared with the plain forward over the paged cache, and removed if
it differs. A model without them is served as well, only slower. So no outcome here is an error.

`probing/equivalence.py` does not fit: it tries modules on one input and compares within rounding.
These two are parts of a whole forward, need steps over a cache, and one must have the same bits.

Shapes: T = tokens of the long prompt, R = rows of logits, V = vocabulary.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model_runtime.batch import Span
from model_runtime.layers import last_layer
from model_runtime.loading.self_check import (
    DECODE_START,
    FIRST_CHUNK_END,
    PagedPrompts,
    SelfCheckReport,
)
from model_runtime.probing.untouched import difference, windows_shrunk

if TYPE_CHECKING:
    from model_runtime.layers.fused_decoder import DecoderLayers  # imports numba

_NUM_LOGIT_ROWS = 2  # tokens that need logits, so that the last layer is pruned


@torch.inference_mode()
def choose_forward(
    prompts: PagedPrompts, report: SelfCheckReport, fused: "DecoderLayers | None" = None
) -> SelfCheckReport:
    """Make the forward of a checked model faster, in place, where the logits stay the same.

    `report` is the check's. Returns it with the bits of the pruned last layer, if that is kept.
    """
    with windows_shrunk(prompts.model):
        long_TV = prompts.long_TV  # of the plain forward, so before anything is installed
        report = _choose_pruning(prompts, report, long_TV)
        if fused is not None:
            _choose_fused(prompts, fused, long_TV)
    return report


def _choose_pruning(
    prompts: PagedPrompts, report: SelfCheckReport, long_TV: Tensor
) -> SelfCheckReport:
    """Prune the last layer if the logits of the last tokens stay within the threshold."""
    model = prompts.model
    last_layer.prune(model, prompts.plans)
    if last_layer.pruned_layer(model) is None:
        return report
    expected_RV = long_TV[-_NUM_LOGIT_ROWS:]
    pruned_RV = _last_logits(prompts)
    if pruned_RV is None or not difference(pruned_RV, expected_RV) <= report.threshold:
        last_layer.restore(model)
        return report
    return replace(report, bitwise=report.bitwise and torch.equal(pruned_RV, expected_RV))


def _last_logits(prompts: PagedPrompts) -> Tensor | None:
    """Return the last tokens' logits by a pruned layer; None if the model raises an error."""
    long_ids, runner = prompts.original.long_ids, prompts.runner()
    first, second = long_ids[:FIRST_CHUNK_END], long_ids[FIRST_CHUNK_END:]
    rows = range(len(second) - _NUM_LOGIT_ROWS, len(second))
    try:
        # The other pages hold another prompt, so a missing write shows.
        runner.run([prompts.span(first, 0, logit_rows=range(0), in_second_pages=True)])
        chunk = prompts.span(second, FIRST_CHUNK_END, logit_rows=rows, in_second_pages=True)
        return runner.run([chunk])
    except Exception:  # noqa: BLE001  # whatever a model's code does with rows that it misses
        return None


def _choose_fused(prompts: PagedPrompts, fused: "DecoderLayers", long_TV: Tensor) -> None:
    """Replace the model's forward by the fused decoder, if both give the same bits."""
    from model_runtime.layers.fused_decoder import restore  # noqa: PLC0415  # imports numba

    model, runner, long = prompts.model, prompts.runner(), prompts.long
    decode = long(DECODE_START, DECODE_START + 1)
    whole = [long(0, len(prompts.original.long_ids))]
    # The steps after the whole prompt write every position that they read.
    steps: list[list[Span]] = [
        [long(0, FIRST_CHUNK_END, range(_NUM_LOGIT_ROWS))],
        [long(FIRST_CHUNK_END, DECODE_START)],
        [decode],
        [decode, decode],
    ]
    plain = [long_TV, *map(runner.run, steps)]
    model.forward = fused
    try:
        is_same = all(map(torch.equal, map(runner.run, [whole, *steps]), plain))
    except Exception:  # noqa: BLE001  # parts that look like others
        is_same = False
    if not is_same:
        restore(model)
