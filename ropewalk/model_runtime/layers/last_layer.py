"""The last layer of a patched model, computed only for the tokens that need logits.

The last layer must write every token's key and value, because later tokens read them. The rest of
the layer leads to logits, and most tokens of a prompt need none. So the layer is pruned: if a step
needs few logits, the layer's own forward is called twice. The first call has all rows and ends
after their keys and values are written. The second call has the requested rows only, and they go on
to the final norm and the logits.

Outside attention, rows do not depend on each other, so the logits stay the same. They are the same
to the bit if products are (packed_linear.py). A model's structure does not prove that it allows
this: install_forward.py tests the model, and restores the layer if the test fails.

Shapes: R = rows that go on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Batch, Span
from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    AttentionCall,
    LayerPlan,
    PagedStep,
    StateCall,
)
from ropewalk.model_runtime.errors import ModelError

_MIN_SPARED = 8  # rows; if fewer are saved, a second call costs more time than it saves


class _WrittenError(Exception):
    """A signal that ends the layer's forward after keys and values are written; no failure."""


class PrunedStep:
    """A step with all tokens up to the last layer's keys and values, then with the logits rows."""

    def __init__(
        self, every: PagedStep, pruned: PagedStep, rows_R: Tensor, last_layer: int
    ) -> None:
        """Combine two steps. `rows_R`: indices of the tokens of `pruned` in `every`."""
        self.every = every
        self.pruned = pruned
        self.last_layer = last_layer
        self._is_written = False
        self.rows_R = rows_R

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Return the result of a layer with states, which comes before the last layer."""
        if self._is_written:
            raise ModelError(f"layer {layer_idx} keeps states, and is called for some rows only")
        return self.every.advance(layer_idx, call)

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the attention's output, [1, T, H, V]; in the last layer [1, R, H, V]."""
        if self._is_written:
            # Checked before the cache is written, because a compiled kernel would write rows
            # without tokens. Gemma 4's last layers reuse the keys of an earlier one, for all rows.
            num_rows, num_keys = call.query_1HTD.shape[2], call.key_1KTD.shape[2]
            expected = len(self.rows_R)
            if layer_idx != self.last_layer or {num_rows, num_keys} != {expected}:
                raise ModelError(
                    f"layer {layer_idx} reads {num_rows} rows and writes {num_keys}. Expected: "
                    f"layer {self.last_layer}, {expected} rows"
                )
            return self.pruned.attend(layer_idx, call)
        if layer_idx != self.last_layer:
            return self.every.attend(layer_idx, call)
        self.every.write(layer_idx, call)
        self._is_written = True
        raise _WrittenError


class _TwoCalls:
    """The forward of a pruned layer, which calls the layer's own forward twice."""

    def __init__(self, layer: nn.Module, layer_idx: int) -> None:
        self._forward = layer.forward
        self.layer_idx = layer_idx

    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        step = named.get(STEP)
        if not isinstance(step, PrunedStep):
            return self._forward(hidden_states, *arguments, **named)
        try:
            return self._forward(hidden_states, *arguments, **named)
        except _WrittenError:
            num_tokens, rows_R = hidden_states.shape[1], step.rows_R
            hidden_states, *arguments = _at_rows([hidden_states, *arguments], num_tokens, rows_R)
            named = {key: _at_rows(each, num_tokens, rows_R) for key, each in named.items()}
            return self._forward(hidden_states, *arguments, **named)


def _at_rows(thing: Any, num_tokens: int, rows_R: Tensor) -> Any:
    """Return tensors that have a row per token, [1, T, ...], with the requested rows only."""
    if isinstance(thing, tuple | list):
        return type(thing)(_at_rows(each, num_tokens, rows_R) for each in thing)
    if isinstance(thing, Tensor) and thing.shape[:2] == (1, num_tokens):
        return thing.index_select(1, rows_R)
    return thing


def prune(model: nn.Module, plans: Mapping[int, LayerPlan]) -> None:
    """Give the last layer the two calls, in place; without a list of layers, do nothing."""
    last = max(plans)
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and len(layers):
            layer = layers[-1]
            if any(getattr(each, "layer_idx", None) == last for each in layer.modules()):
                layer.forward = _TwoCalls(layer, last)
                return


def restore(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(vars(layer).get("forward"), _TwoCalls):
            del layer.forward


def pruned_layer(model: nn.Module) -> int | None:
    forwards = (vars(layer).get("forward") for layer in model.modules())
    return next((each.layer_idx for each in forwards if isinstance(each, _TwoCalls)), None)


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
