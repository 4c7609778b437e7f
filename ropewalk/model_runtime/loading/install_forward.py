"""Install the forward of a checked model: a pruned last layer, and a program, if they agree.

Each of these is installed, compared with the plain forward over the paged cache, and removed if it
differs. A model without them is served as well, only slower. So no outcome here is an error.

`probing/equivalence.py` does not fit: it tries modules on one input and compares within rounding.
These are parts of a whole forward, need steps over a cache, and a CPU's must have the same bits.

Shapes: T = tokens of the long prompt, R = rows of logits, V = vocabulary.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.layers import last_layer
from ropewalk.model_runtime.loading.self_check import (
    DECODE_START,
    FIRST_CHUNK_END,
    PagedPrompts,
    SelfCheckReport,
    same_bits,
)
from ropewalk.model_runtime.probing.untouched import LONG_LEN, difference, windows_shrunk

if TYPE_CHECKING:
    from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward  # imports triton
    from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers  # imports numba

_log = structlog.get_logger(__name__)

_NUM_LOGIT_ROWS = 2  # tokens that need logits, so that the last layer is pruned


@torch.inference_mode()
def install_forward(
    prompts: PagedPrompts,
    report: SelfCheckReport,
    fused: "DecoderLayers | None" = None,
    flat: "FlatForward | None" = None,
) -> SelfCheckReport:
    """Make the forward of a checked model faster, in place, where the logits stay the same.

    `report` is the check's. Returns it with the bits of the pruned last layer, if that is kept.
    """
    with windows_shrunk(prompts.model):
        long_TV = prompts.long_TV  # of the plain forward, so before anything is installed
        report = _choose_pruning(prompts, report, long_TV)
        if fused is not None:
            fused.note_windows(prompts.model)
            _choose_fused(prompts, fused, long_TV)
        if flat is not None:
            flat.note_windows(prompts.model)
            _choose_flat(prompts, flat, report.threshold)
    if fused is not None:
        fused.note_windows(prompts.model)
    if flat is not None:
        flat.note_windows(prompts.model)
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
    return replace(report, bitwise=report.bitwise and same_bits(pruned_RV, expected_RV))


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


def _choose_flat(prompts: PagedPrompts, flat: "FlatForward", threshold: float) -> None:
    """Replace the model's forward by its launches, if all logits stay within the threshold."""
    model, runner, long = prompts.model, prompts.runner(), prompts.long
    decode = long(DECODE_START, DECODE_START + 1)
    steps: list[list[Span]] = [
        [long(0, LONG_LEN)],
        [long(0, FIRST_CHUNK_END, range(_NUM_LOGIT_ROWS))],
        [long(FIRST_CHUNK_END, DECODE_START), decode],
        [decode],
    ]
    plain = list(map(runner.run, steps))
    model.forward = flat
    try:
        differences = [
            difference(runner.run(step), expected)
            for step, expected in zip(steps, plain, strict=True)
        ]
        reason = f"has other logits by {max(differences):.3g}, and {threshold:.3g} is allowed"
        is_same = all(each <= threshold for each in differences)  # NaN is not
    except Exception as error:  # noqa: BLE001  # modules that do not compute by rows
        is_same, reason = False, f"{type(error).__name__}: {error}"
    if not is_same:
        _log.info("forward_not_flat", model=type(model).__name__, reason=reason)
        del model.forward


def _choose_fused(prompts: PagedPrompts, fused: "DecoderLayers", long_TV: Tensor) -> None:
    """Replace the model's forward by the fused decoder, if both give the same bits."""
    from ropewalk.model_runtime.layers.fused.decoder import (  # noqa: PLC0415  # imports numba
        restore,
    )

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
        reason = "has other bits than its own forward"
    except Exception as error:  # noqa: BLE001  # parts that look like others
        is_same, reason = False, f"{type(error).__name__}: {error}"
    if not is_same:
        _log.info("decoder_not_fused", model=type(model).__name__, reason=reason)
        restore(model)
