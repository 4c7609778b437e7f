"""Attention of long prompts by flash attention 4, on Hopper and Blackwell.

The package flash-attn-4 (the extra `hopper`) compiles its kernels at first use, for each size of
heads, mask and type. It is called by its own function: torch 2.13's registry for it unpacks two
results where this version returns five. A trial at the start compares it with flash attention 2 of
torch, which serves where the package is absent, wrong or slower.

Shapes: T = packed query tokens of a group, C = its packed keys, H = query heads, K = key heads,
D = head dimensions.
"""

import os
import statistics
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import structlog
import torch
import triton
from torch import Tensor

from ropewalk.model_runtime.attention.prompt_groups import Mask

# Takes what `flash.flash` does, and returns the same.
Attention = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, Mask], tuple[Tensor, Tensor]
]
# Query tokens from which on the GPU takes longer than the package's Python for a call.
LEAST_TOKENS = 1024
_CAPABILITIES = (9, 10)
# Limits of the trial: bfloat16 has 8 bits, and outputs are means of values of about 1.
_MOST_DIFFERENCE, _MOST_LSE_DIFFERENCE = 2e-2, 2e-3
_TIMED_TOKENS, _ROUNDS = 8192, 7
_MASKS = (Mask(-1, 0), Mask(-1, -1), Mask(200, 0))

_log = structlog.get_logger(__name__)


def flash_4(
    query_THD: Tensor,
    key_CKD: Tensor,
    value_CKD: Tensor,
    cu_tokens_G1: Tensor,
    cu_keys_G1: Tensor,
    most_tokens: int,
    most_keys: int,
    scaling: float,
    mask: Mask,
) -> tuple[Tensor, Tensor]:
    """Compute attention as `flash.flash` does: [T, H, D], and the log-sum-exp [H, T]."""
    left, right = (None if side < 0 else side for side in mask)
    out_THD, lse_HT = _function()(
        query_THD,
        key_CKD,
        value_CKD,
        cu_seqlens_q=cu_tokens_G1,
        cu_seqlens_k=cu_keys_G1,
        max_seqlen_q=most_tokens,
        max_seqlen_k=most_keys,
        softmax_scale=scaling,
        window_size=(left, right),  # without a left side and with nothing after it is causal
        return_lse=True,
    )
    return out_THD, lse_HT


@cache
def _function() -> Callable[..., tuple[Tensor, Tensor]]:
    """Import the package's function, and keep what it compiles beside Triton's kernels."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    folder = f"{triton.knobs.cache.dir}/flash_attn_4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", folder)
    from flash_attn.cute import flash_attn_varlen_func  # noqa: PLC0415  # the extra `hopper`

    function: Callable[..., tuple[Tensor, Tensor]] = flash_attn_varlen_func
    return function


def is_installed(device: torch.device) -> bool:
    """Return whether the package is there and knows the device."""
    return (
        device.type == "cuda"
        and find_spec("flash_attn") is not None
        and find_spec("flash_attn.cute") is not None
        and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES
    )


def is_better(device: torch.device, own: Attention, other: Attention) -> bool:
    """Return whether `own` computes what `other` does, and is faster. Takes seconds.

    The reason against it is logged, an error of the package included.
    """
    try:
        wrong = next((mask for mask in _MASKS if not _agree(device, own, other, mask)), None)
        if wrong is not None:
            _log.warning("flash_attention_4_is_wrong", mask=tuple(wrong))
            return False
        own_ms, other_ms = _times(device, own, other)
    except Exception as error:  # noqa: BLE001  # of a compiler, a driver or an import
        _log.warning("flash_attention_4_fails", error=f"{type(error).__name__}: {error}")
        return False
    _log.info("flash_attention_4_tried", ms=round(own_ms, 3), flash_2_ms=round(other_ms, 3))
    return own_ms < other_ms


def _inputs(device: torch.device, lens: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Return queries, keys, values and both cumulative offsets of prompts with these lengths."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(num_rows: int, num_heads: int) -> Tensor:
        shape = num_rows, num_heads, 128
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    offsets = [[0], [0]]
    for each in lens:
        for ends, num in zip(offsets, each, strict=True):
            ends.append(ends[-1] + num)
    num_tokens, num_keys = (ends[-1] for ends in offsets)
    cu_tokens_G1, cu_keys_G1 = (
        torch.tensor(ends, dtype=torch.int32, device=device) for ends in offsets
    )
    rows = numbers(num_tokens, 8), numbers(num_keys, 2), numbers(num_keys, 2)
    return *rows, cu_tokens_G1, cu_keys_G1


def _agree(device: torch.device, own: Attention, other: Attention, mask: Mask) -> bool:
    """Return whether both give the same answer for two prompts, of which one has earlier keys."""
    given = *_inputs(device, [(70, 300), (190, 190)]), 190, 300, 128**-0.5, mask
    (own_THD, own_HT), (other_THD, other_HT) = own(*given), other(*given)
    difference = (own_THD.float() - other_THD.float()).abs().max()
    lse_difference = (own_HT - other_HT).abs().max()
    return bool(difference <= _MOST_DIFFERENCE) and bool(lse_difference <= _MOST_LSE_DIFFERENCE)


def _times(device: torch.device, own: Attention, other: Attention) -> tuple[float, float]:
    """Return the median milliseconds of both for one prompt, in turns."""
    size = _TIMED_TOKENS
    given = *_inputs(device, [(size, size)]), size, size, 128**-0.5, Mask(-1, 0)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(_ROUNDS):
        for found, attention in zip(times, (own, other), strict=True):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            attention(*given)
            ended.record()
            torch.cuda.synchronize(device)
            found.append(begun.elapsed_time(ended))
    return statistics.median(times[0]), statistics.median(times[1])
