"""The last layer of a program, computed only for the tokens that need logits.

The last layer must write every token's key and value, because later tokens read them. The rest of
the layer leads to logits, and most tokens of a prompt need none. So if a step needs few logits, a
program (DecoderLayers, FlatForward) cuts its values to the requested rows after the last write. A
model without a program computes its whole last layer.

Outside attention, rows do not depend on each other, so the logits stay the same. They are the same
to the bit if products are (packed_linear.py).

Shapes: R = rows that go on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Batch, Span
from ropewalk.model_runtime.attention.paged_attention import Backend, LayerPlan, PagedContext

_MIN_SPARED = 8  # rows; if fewer are saved, a second batch costs more time than it saves


@dataclass(frozen=True, slots=True)
class PrunedContext:
    """All tokens of a step up to the last layer's keys and values, then the rows of logits."""

    every: PagedContext
    pruned: PagedContext
    rows_R: Tensor  # indices of the tokens of `pruned` in `every`


def prunes(model: nn.Module, plans: Mapping[int, LayerPlan], backend: type[Backend]) -> bool:
    """Return whether a model's forward is a program that takes such steps."""
    takes: Any = getattr(vars(model).get("forward"), "takes_pruned", None)
    return takes is not None and takes(plans, backend)


def pruned_spans(spans: Sequence[Span]) -> list[Span] | None:
    """Return the spans cut to the tokens that need logits; None if that saves little.

    If no token needs logits, the result is the last token, without a row of logits.
    """
    num_rows = sum(len(span.logit_rows) for span in spans)
    num_spared = sum(len(span.token_ids) for span in spans) - num_rows
    if num_spared < max(num_rows, _MIN_SPARED):
        return None
    if num_rows == 0:
        last = spans[-1]
        return [_cut(last, len(last.token_ids) - 1, len(last.token_ids))._replace(logit_rows=())]
    pruned = []
    for span in spans:
        rows = span.logit_rows
        if rows:
            if rows[-1] + 1 - rows[0] != len(rows):
                return None  # the rows are not consecutive
            pruned.append(_cut(span, rows[0], rows[-1] + 1))
    return pruned


def _cut(span: Span, first: int, end: int) -> Span:
    return Span(
        span.token_ids[first:end],
        span.first_position + first,
        span.pages,
        span.table_id,
        range(end - first),
    )


def logits_indices(batch: Batch) -> Tensor:
    """Return the indices of the tokens of `pruned_spans` in the batch of all spans, int64 [R]."""
    if len(batch.logit_rows_R):
        return batch.logit_rows_R
    last = batch.token_ids_1T.shape[1] - 1
    return batch.logit_rows_R.new_full((1,), last)


def host_logits_indices(spans: Sequence[Span]) -> list[int]:
    """Return the indices that `logits_indices` returns, on the host."""
    begin, rows = 0, []
    for span in spans:
        rows += [begin + row for row in span.logit_rows]
        begin += len(span.token_ids)
    return rows or [begin - 1]
