"""The last layer of a taken-over model, computed only where its answer is asked for.

Of the last layer every token's key and value are wanted, for later tokens read them. The rest of it
leads to logits, and most tokens of a prompt are asked for none. So where a step asks for few, the
layer's own forward is called twice: with all rows, until their keys and values are written, and
with the rows that are asked for, which go on alone to the final norm and the logits.

Outside attention rows do not depend on each other, so an answer stays the same (to the bit where
products are, packed_linear.py). Whether a model bears it is not concluded from its structure:
self_check.py asks it, and takes `trim` back where it does not.

Shapes: R = rows that go on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from model_runtime.attention.paged_attention import STEP, AttentionCall, LayerPlan
from model_runtime.batch import Batch, Span
from model_runtime.errors import ModelError

_FEWEST_SPARED = 8  # rows below which a second call costs more than it spares


class _WrittenError(Exception):
    """Leaves the layer's forward when keys and values are in the cache; nothing is wrong."""


class WritingStep(Protocol):
    """A step that can also leave the reading out."""

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Write and read; the attention's output, [1, T, H, V]."""

    def write(self, layer_idx: int, call: AttentionCall) -> None:
        """Write keys and values of the step's tokens to the cache."""


class AskedStep:
    """A step of all tokens up to the last layer's keys and values, and of few from there on."""

    def __init__(
        self, every: WritingStep, asked: WritingStep, rows_R: Tensor, last_layer: int
    ) -> None:
        """`rows_R`: where the tokens of `asked` are among those of `every`."""
        self.every = every
        self.asked = asked
        self.last_layer = last_layer
        self._is_written = False
        self.rows_R = rows_R

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """The attention's output, [1, T, H, V]; in the last layer [1, R, H, V]."""
        if self._is_written:
            # Told before the cache is: a compiled kernel would write where there are no tokens.
            num_rows = call.query_1HTD.shape[2]
            if layer_idx != self.last_layer or num_rows != len(self.rows_R):
                raise ModelError(
                    f"layer {layer_idx} reads {num_rows} rows. Asked for: layer "
                    f"{self.last_layer}, {len(self.rows_R)} rows"
                )
            return self.asked.attend(layer_idx, call)
        if layer_idx != self.last_layer:
            return self.every.attend(layer_idx, call)
        self.every.write(layer_idx, call)
        self._is_written = True
        raise _WrittenError


class _TwoCalls:
    """The forward of a trimmed layer."""

    def __init__(self, layer: nn.Module, layer_idx: int) -> None:
        self._forward = layer.forward
        self.layer_idx = layer_idx

    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        step = named.get(STEP)
        if not isinstance(step, AskedStep):
            return self._forward(hidden_states, *arguments, **named)
        try:
            return self._forward(hidden_states, *arguments, **named)
        except _WrittenError:
            num_tokens, rows_R = hidden_states.shape[1], step.rows_R
            hidden_states, *arguments = _at_rows([hidden_states, *arguments], num_tokens, rows_R)
            named = {key: _at_rows(each, num_tokens, rows_R) for key, each in named.items()}
            return self._forward(hidden_states, *arguments, **named)


def _at_rows(thing: Any, num_tokens: int, rows_R: Tensor) -> Any:
    """What has a row for each token, [1, T, ...], with the asked ones only."""
    if isinstance(thing, tuple | list):
        return type(thing)(_at_rows(each, num_tokens, rows_R) for each in thing)
    if isinstance(thing, Tensor) and thing.shape[:2] == (1, num_tokens):
        return thing.index_select(1, rows_R)
    return thing


def trim(model: nn.Module, plans: Mapping[int, LayerPlan]) -> None:
    """Give the last layer the two calls, in place; a model without a list of layers stays."""
    last = max(plans)
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and len(layers):
            layer = layers[-1]
            if any(getattr(each, "layer_idx", None) == last for each in layer.modules()):
                layer.forward = _TwoCalls(layer, last)
                return


def untrim(model: nn.Module) -> None:
    """Take it back."""
    for layer in model.modules():
        if isinstance(vars(layer).get("forward"), _TwoCalls):
            del layer.forward


def trimmed_layer(model: nn.Module) -> int | None:
    """The index of the layer that has two calls."""
    forwards = (vars(layer).get("forward") for layer in model.modules())
    return next((each.layer_idx for each in forwards if isinstance(each, _TwoCalls)), None)


def asked_spans(spans: Sequence[Span]) -> list[Span] | None:
    """The spans cut down to the tokens whose logits are asked for; None where that spares little.

    Where none is asked for, it is the last token, still without a row of logits.
    """
    num_rows = sum(len(span.logit_rows) for span in spans)
    num_spared = sum(len(span.token_ids) for span in spans) - num_rows
    if num_spared < max(num_rows, _FEWEST_SPARED):
        return None
    if num_rows == 0:
        last = spans[-1]
        return [_cut(last, len(last.token_ids) - 1, len(last.token_ids))._replace(logit_rows=())]
    asked = []
    for span in spans:
        rows = span.logit_rows
        if rows:
            if rows[-1] + 1 - rows[0] != len(rows):
                return None  # they are not one after the other
            asked.append(_cut(span, rows[0], rows[-1] + 1))
    return asked


def _cut(span: Span, first: int, behind: int) -> Span:
    return Span(
        span.token_ids[first:behind],
        span.first_position + first,
        span.pages,
        span.table_slot,
        range(behind - first),
    )


def asked_rows(batch: Batch) -> Tensor:
    """Where the tokens of `asked_spans` are in the batch of the spans, int64 [R]."""
    if len(batch.logit_rows_R):
        return batch.logit_rows_R
    last = batch.token_ids_1T.shape[1] - 1
    return batch.logit_rows_R.new_full((1,), last)
