"""Penalties on tokens that a request has seen; their counts are kept between steps.

Shapes: R = rows, V = vocabulary, E = distinct tokens of each row, with the rows concatenated.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.transfer import on_device


def has_penalty(params: SamplingParams) -> bool:
    """Return whether a request's earlier tokens change its logits."""
    return params.repetition_penalty != 1 or bool(
        params.presence_penalty or params.frequency_penalty
    )


class SeenTokens:
    """The distinct tokens of a prompt and its answer, with their counts in the answer."""

    def __init__(self, prompt_ids: Sequence[int], generated_ids: Sequence[int] = ()) -> None:
        ids = list(dict.fromkeys(prompt_ids))
        self._place = {token_id: place for place, token_id in enumerate(ids)}
        self._ids = np.array(ids, dtype=np.int64)
        self._counts = np.zeros(len(ids), dtype=np.float32)
        for token_id in generated_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Add a token of the answer, in amortised constant time."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):  # double the capacity, so that few tokens cause a copy
                self._ids = np.concatenate((self._ids, np.zeros(place + 16, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(place + 16, np.float32)))
            self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids_E(self) -> Any:
        """Return the distinct token ids, int64."""
        return self._ids[: len(self._place)]

    @property
    def counts_E(self) -> Any:
        """Return their counts in the answer, float32; 0 for tokens only in the prompt."""
        return self._counts[: len(self._place)]


def penalise(
    logits_RV: Tensor, penalised: Sequence[tuple[int, SamplingParams, SeenTokens]]
) -> None:
    """Apply the penalties of (row, parameters, tokens) in place, to the seen tokens only.

    Repetition as in transformers (prompt and answer); presence and frequency as in OpenAI (answer).
    """
    rows, params, seen = zip(*penalised, strict=True)
    sizes = [len(each.ids_E) for each in seen]

    def spread(numbers: Sequence[float]) -> Tensor:
        """Return each row's number, repeated for its tokens."""
        return on_device(np.repeat(np.array(numbers, np.float32), sizes), device)

    device = logits_RV.device
    where = (
        on_device(np.repeat(np.array(rows), sizes), device),
        on_device(np.concatenate([each.ids_E for each in seen]), device),
    )
    count_E = on_device(np.concatenate([each.counts_E for each in seen]), device)
    repetition_E = spread([each.repetition_penalty for each in params])
    frequency_E = spread([each.frequency_penalty for each in params])
    presence_E = spread([each.presence_penalty for each in params])
    logit_E = logits_RV[where]
    logit_E = torch.where(logit_E > 0, logit_E / repetition_E, logit_E * repetition_E)
    logits_RV[where] = logit_E - frequency_E * count_E - presence_E * (count_E > 0)
