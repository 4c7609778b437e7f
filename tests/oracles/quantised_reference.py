"""Quantised pages by their definition, in numpy: no line of it is the product's.

`quantised` gives the numbers that a page is read as. `ReferenceModel` is transformers' own model in
float64 whose queries read earlier pages quantised, and their own page as it was computed.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

BITS = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4)}  # of keys and values
SMALL_GROUPS = {
    "k8v4": 8,
    "int4": 8,
}  # dimensions of a value that share a step; tiny models have 16
_NAME = "quantised_reference"


def codes(rows_RL: NDArray[Any], bits: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The codes, lowest numbers and steps of float32 rows; a row without a number has a NaN."""
    most = np.float32(2**bits - 1)
    is_finite_R = np.isfinite(rows_RL).all(1)
    rows_RL = np.where(is_finite_R[:, None], rows_RL, np.float32(0))
    exact_R = np.clip(rows_RL.min(1), -65504, 65504)
    low_R = exact_R.astype(np.float16)
    with np.errstate(over="ignore"):  # below -65504, where none is needed
        below_R = np.nextafter(low_R, np.float16(-np.inf))
    low_R = np.where(low_R.astype(np.float32) > exact_R, below_R, low_R)
    span_R = (rows_RL.max(1) - low_R.astype(np.float32)) / most
    step_R = np.clip(span_R, np.float32(2**-14), 65504).astype(np.float16)
    inverse_R = np.float32(1) / step_R.astype(np.float32)
    found_RL = np.rint((rows_RL - low_R.astype(np.float32)[:, None]) * inverse_R[:, None])
    step_R[~is_finite_R] = np.nan
    return np.clip(found_RL, 0, most).astype(np.uint8), low_R, step_R


def quantised(rows_RL: Tensor, bits: int) -> Tensor:
    """The numbers that rows are read as, float64."""
    code_RL, low_R, step_R = codes(rows_RL.float().numpy(), bits)
    exact_RL = code_RL * step_R.astype(np.float64)[:, None] + low_R.astype(np.float64)[:, None]
    return torch.from_numpy(exact_RL)


def quantised_pages(
    numbers_CKX: Tensor, page_size: int, bits: int, *, by_channel: bool, group: int | None = None
) -> Tensor:
    """Keys (by channel of a page) or values (by token or group) of whole pages, quantised; float64.

    Each half of a channel in four bits has its own lowest number and step.
    """
    num_tokens, num_heads, dim = numbers_CKX.shape
    out = numbers_CKX.double().clone()
    for first in range(0, num_tokens - num_tokens % page_size, page_size):
        page = slice(first, first + page_size)
        for head in range(num_heads):
            rows = numbers_CKX[page, head]
            if by_channel:
                halves = rows.chunk(2 if bits == 4 else 1)
                out[page, head] = torch.cat([quantised(half.T, bits).T for half in halves])
            else:
                found = quantised(rows.reshape(-1, group or dim), bits)
                out[page, head] = found.view(page_size, dim)
    return out.view(num_tokens, num_heads, dim)


def record(keys_DO: NDArray[Any], values_XV: NDArray[Any], kind: str) -> bytes:
    """The record of one page and head."""
    parts, parameters = [], []
    for rows, bits in zip((keys_DO, values_XV), BITS[kind], strict=True):
        if rows is keys_DO and bits == 4:
            both = [codes(half, bits) for half in np.split(rows, 2, 1)]
            code = np.hstack([each[0] for each in both])
            low, step = (np.hstack([each[at] for each in both]) for at in (1, 2))
        else:
            code, low, step = codes(rows, bits)
        if bits == 4:
            half = code.shape[1] // 2
            code = code[:, :half] | (code[:, half:] << 4)
        parts.append(code.tobytes())
        parameters += [low.tobytes(), np.where(np.isnan(step), np.float16(np.nan), step).tobytes()]
    return b"".join((*parts, *parameters))


class ReferenceModel:
    """A model of transformers, in float64, over quantised pages. It changes the model's module."""

    def __init__(self, model: PreTrainedModel, kind: str, page_size: int) -> None:
        self._model = model.double().eval()
        self._bits, self._page_size = BITS[kind], page_size
        self._group = SMALL_GROUPS.get(kind)
        self._quantised_keys: list[Tensor] = []  # rotated, of the layer that is computed
        self._module = sys.modules[type(model).__module__]
        self._rotate: Callable[..., Any] = self._module.apply_rotary_pos_emb

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """The logprobs after every token, [T, V]."""
        AttentionInterface.register(_NAME, self._attend)
        self._module.apply_rotary_pos_emb = self._rotated  # type: ignore[attr-defined]
        try:
            self._model.set_attn_implementation(_NAME)
            with torch.inference_mode():
                logits = self._model(torch.tensor([token_ids]), use_cache=False).logits
        finally:
            self._module.apply_rotary_pos_emb = self._rotate  # type: ignore[attr-defined]
        return torch.log_softmax(logits[0].double(), -1)

    def _rotated(self, query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Any:
        """Rotate, and keep the keys that are quantised before the rotation."""
        key_CKD = key[0].transpose(0, 1)
        found = quantised_pages(key_CKD, self._page_size, self._bits[0], by_channel=True)
        again = found.transpose(0, 1)[None].to(key.dtype)
        self._quantised_keys = [self._rotate(query, again, *arguments, **named)[1]]
        return self._rotate(query, key, *arguments, **named)

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        scaling: float | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        (old_key,) = self._quantised_keys
        value_CKV = value[0].transpose(0, 1)
        found = quantised_pages(
            value_CKV, self._page_size, self._bits[1], by_channel=False, group=self._group
        )
        old_value = found.transpose(0, 1)[None].to(value.dtype)
        group = query.shape[1] // key.shape[1]
        window, cap, sinks = (named.get(each) for each in ("sliding_window", "softcap", "s_aux"))
        parts = []
        for first in range(0, query.shape[2], self._page_size):
            end = min(query.shape[2], first + self._page_size)
            keys, values = (
                torch.cat((old[:, :, :first], new[:, :, first:end]), 2).repeat_interleave(group, 1)
                for old, new in ((old_key, key), (old_value, value))
            )
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            logits = query[:, :, first:end] @ keys.transpose(2, 3) * scale
            if cap:
                logits = cap * torch.tanh(logits / cap)
            distance = torch.arange(first, end)[:, None] - torch.arange(end)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
                weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
            else:
                weights = logits.softmax(-1)
            parts.append((weights @ values).transpose(1, 2))
        assert module is not None
        return torch.cat(parts, 1), None
