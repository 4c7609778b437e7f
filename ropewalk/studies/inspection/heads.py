"""Means and spreads of the queries and keys of a model's heads on a sample text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.held_out import Document, library_documents
from ropewalk.server.settings.load import ServeSettings, SettingsError, read_named
from ropewalk.server.startup.load_model import load_model
from ropewalk.studies.inspection.layer_statistics import LayerStatistics
from ropewalk.studies.inspection.options import InspectOptions

_DEFAULT_TOKENS = 2048
_SEQUENCE_TOKENS = 512  # short, so that many texts are sampled at their beginning
_CHARS_PER_TOKEN = 4  # of ordinary prose; if tokens are shorter, the end of a piece is unread
_ALL = "all"


@dataclass(frozen=True, slots=True)
class InspectedHeads:
    """Statistics by layer, and their source."""

    layers: Mapping[int, LayerStatistics]
    sample: str
    num_tokens: int
    num_sequences: int


def check_sample(options: InspectOptions) -> None:
    """Raise SettingsError for a sample without --heads, which would not be read."""
    for name in ("sample_text", "sample_tokens"):
        value = getattr(options, name)
        if options.heads is None and value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{flag} is for --heads, which is not given, got {value}")


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layer indices in ascending order. Raises SettingsError."""
    accepted = f"must be all, or layers from 0 to {num_layers - 1} with commas between them"
    if text == _ALL:
        return tuple(range(num_layers))
    try:
        layers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise SettingsError(f"--heads {accepted}, got {text!r}") from error
    if not 0 <= layers[0] <= layers[-1] < num_layers:
        raise SettingsError(f"--heads {accepted}, got {text!r}")
    return layers


def read_sample(options: InspectOptions) -> list[Document]:
    """Read the sample texts. Raises SettingsError."""
    if options.sample_text is None:
        return library_documents(held_out=True)
    text = read_named("--sample-text", options.sample_text)
    return [Document(str(options.sample_text), text)]


def inspect_heads(
    settings: ServeSettings,
    layers: Sequence[int],
    documents: Sequence[Document],
    options: InspectOptions,
) -> InspectedHeads:
    """Load the model and run the sample through it. Raises ModelError or SettingsError."""
    # Imported here, because only --heads needs numba and transformers.
    from ropewalk.studies.inspection.head_statistics import (  # noqa: PLC0415
        head_statistics,
        sequence_len,
    )

    checkpoint = load_model(settings)
    length = sequence_len(checkpoint, _SEQUENCE_TOKENS)
    sequences = _sequences(
        documents, checkpoint.tokenizer, length, options.sample_tokens or _DEFAULT_TOKENS
    )
    num_tokens = sum(map(len, sequences))
    if num_tokens < 2:
        raise SettingsError(f"--sample-text must have >= 2 tokens, got {num_tokens}")
    sample = "the standard library's held-out sources"
    if options.sample_text is not None:
        sample = str(options.sample_text)
    statistics = head_statistics(checkpoint, sequences, layers)
    return InspectedHeads(statistics, sample, num_tokens, len(sequences))


def _sequences(
    documents: Sequence[Document], tokenizer: Tokenizer, length: int, num_tokens: int
) -> list[list[int]]:
    """Yield sequences of up to `length` tokens, until `num_tokens` or the end of the text."""
    sequences: list[list[int]] = []
    left = num_tokens
    for piece in _pieces(documents, length * _CHARS_PER_TOKEN):
        token_ids = tokenizer.encode(piece)[: min(length, left)]
        if token_ids:
            sequences.append(token_ids)
        left -= len(token_ids)
        if left == 0:
            break
    return sequences


def _pieces(documents: Sequence[Document], num_chars: int) -> Iterator[str]:
    """Yield the first piece of every document, then the second of every one that has it, ..."""
    for number in count():
        start = number * num_chars
        pieces = [each.text[start : start + num_chars] for each in documents]
        if not any(pieces):
            return
        yield from filter(None, pieces)


def head_lines(found: InspectedHeads) -> list[str]:
    """Return a row per query head, with means and spreads of it and of its key head."""
    lines = [
        f"heads before rotation, on {found.num_tokens} tokens of {found.sample} "
        f"({found.num_sequences} sequences): length of the mean, spread around it",
        f"{'layer':>5}  {'head':>4}  {'mean q':>8}  {'spread q':>8}  {'key head':>8}  "
        f"{'mean k':>8}  {'spread k':>8}  table",
    ]
    lines += [
        f"{index:>5}  {row['head']:>4}  {row['query_mean']:>8.4g}  {row['query_spread']:>8.4g}  "
        f"{row['key_head']:>8}  {row['key_mean']:>8.4g}  {row['key_spread']:>8.4g}  "
        f"{layer.plan.layer_type or 'does not rotate'}"
        for index, layer in found.layers.items()
        for row in _head_rows(layer)
    ]
    return lines


def heads_json(found: InspectedHeads) -> dict[str, Any]:
    """Return the statistics without the scores."""
    return {
        "sample": found.sample,
        "num_tokens": found.num_tokens,
        "num_sequences": found.num_sequences,
        "layers": [
            {
                "layer": index,
                "layer_type": layer.plan.layer_type,
                "rotary_dim": layer.plan.rotary_dim,
                "sliding_window": layer.sliding_window,
                "scaling": layer.scaling,
                "heads": _head_rows(layer),
            }
            for index, layer in found.layers.items()
        ],
    }


def _head_rows(layer: LayerStatistics) -> list[dict[str, Any]]:
    key = layer.key_by_query_head
    columns = (
        layer.key_head_H.tolist(),
        layer.query.mean_HD.norm(dim=-1).tolist(),
        layer.query.spread_H.tolist(),
        key.mean_HD.norm(dim=-1).tolist(),
        key.spread_H.tolist(),
    )
    names = ("key_head", "query_mean", "query_spread", "key_mean", "key_spread")
    return [
        {"head": head, **dict(zip(names, row, strict=True))}
        for head, row in enumerate(zip(*columns, strict=True))
    ]
