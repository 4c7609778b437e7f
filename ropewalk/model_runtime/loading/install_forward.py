"""Install a program as the forward of a checked model, if it has the logits of the modules.

A model without a program is served as well, only slower. So no outcome here is an error.

`probing/equivalence.py` does not fit: it tries modules on one input and compares within rounding.
This is a whole forward, needs steps over a cache, and a CPU's must have the same bits.
"""

from typing import TYPE_CHECKING, Any, Union

import structlog
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.loading.self_check import DECODE_START, FIRST_CHUNK_END, PagedPrompts
from ropewalk.model_runtime.probing.untouched import LONG_LEN, difference, windows_shrunk

if TYPE_CHECKING:
    from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward  # imports triton
    from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers  # imports numba

_log = structlog.get_logger(__name__)

_NUM_LOGIT_ROWS = 2  # tokens that need logits, so that the last layer is pruned


AnyForward = Union["DecoderLayers", "FlatForward"]


def install_known(model: nn.Module, forward: AnyForward) -> None:
    """Replace a model's forward, in place, without a comparison of logits."""
    forward.note_windows(model)
    model.forward = forward


@torch.inference_mode()
def install_forward(
    prompts: PagedPrompts, forward: AnyForward, allowed: float | None
) -> str | None:
    """Replace a model's forward, in place, where the logits stay the same; return why not.

    They are the same to the bit. If the forward says that its bits differ, then `allowed` is the
    largest difference in a logit.
    """
    model: Any = prompts.model
    with windows_shrunk(model):
        runner = prompts.runner()
        expected = [prompts.long_TV, *map(runner.run, _steps(prompts, in_second_pages=False))]
        install_known(model, forward)
        try:
            # The other pages hold another prompt, so a missing write shows.
            steps = _steps(prompts, in_second_pages=True)
            found = [runner.run([prompts.long(0, LONG_LEN)]), *map(runner.run, steps)]
            reason = _fault(found, expected, None if forward.has_same_bits else allowed)
        except Exception as error:  # noqa: BLE001  # parts that look like others
            reason = f"{type(error).__name__}: {error}"
    if reason is None:
        forward.note_windows(model)
        return None
    _log.info("forward_not_installed", model=type(model).__name__, reason=reason)
    del model.forward
    return reason


def _steps(prompts: PagedPrompts, *, in_second_pages: bool) -> list[list[Span]]:
    """Return a chunk with few logits, a chunk alone and beside a decode, and decodes."""
    ids = prompts.ids.long

    def span(first: int, end: int, logit_rows: range | None = None) -> Span:
        return prompts.span(
            ids[first:end], first, logit_rows=logit_rows, in_second_pages=in_second_pages
        )

    few = span(0, FIRST_CHUNK_END, range(_NUM_LOGIT_ROWS))
    chunk = span(FIRST_CHUNK_END, DECODE_START)
    decode = span(DECODE_START, DECODE_START + 1)
    return [[few], [chunk], [chunk, decode], [decode], [decode, decode]]


def _fault(found: list[Tensor], expected: list[Tensor], allowed: float | None) -> str | None:
    """Return how logits differ by more than is allowed; None if they do not."""
    if allowed is None:
        return None if all(map(torch.equal, found, expected)) else "has other bits than its modules"
    differences = [difference(*pair) for pair in zip(found, expected, strict=True)]
    if all(each <= allowed for each in differences):  # NaN is not
        return None
    return f"has other logits by {max(differences):.3g}, and {allowed:.3g} is allowed"
