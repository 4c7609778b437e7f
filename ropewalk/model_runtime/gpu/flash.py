"""The prefill's attention by flash attention, for all prompts of a group in one call.

It is torch's flash attention 2, or for many tokens flash attention 4 if it is installed and passes
its trial (cards/flash_4.py). Torch's is called by its name. torch's dispatcher
(`scaled_dot_product_attention`) may choose cuDNN, which makes a plan for every new length, and it
takes no packed rows. The function and its arguments are the same in torch 2.11 and 2.13, whose
`torch.nn.attention.varlen` calls it, too.

Shapes: T = packed query tokens of a group, C = its packed keys, H = query heads, K = key heads,
D = head dimensions.
"""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.prompt_groups import Mask, PromptGroup
from ropewalk.model_runtime.gpu.cards.flash_4 import LEAST_TOKENS, flash_4, is_better, is_installed
from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import padded
from ropewalk.model_runtime.gpu.rotate import heads_at_once

_MOST_DIM = 256
_DIM_STEP = 8
_LEAST_CAPABILITY = (8, 0)


@jit
def _place(
    packed, lses, sinks, rows, out, out_t, out_h,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_2: tl.constexpr, DIM_2: tl.constexpr,
    SUNK: tl.constexpr,
):  # fmt: skip
    """Write some heads of a token to its flat row. SUNK: the sink takes its share of the weight."""
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    if row < 0:
        return  # padding of a captured step
    h, d = tl.program_id(1) * HEADS_2 + tl.arange(0, HEADS_2), tl.arange(0, DIM_2)[None, :]
    mask = (h < HEADS)[:, None] & (d < DIM)
    source = packed + (token.to(tl.int64) * HEADS + h)[:, None] * DIM + d
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if SUNK:
        # The keys' share is exp(lse) / (exp(lse) + exp(sink)).
        lse = tl.load(lses + h * tl.num_programs(0) + token, mask=h < HEADS, other=0.0)
        sink = tl.load(sinks + h, mask=h < HEADS, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(lse - sink)[:, None]
    tl.store(out + row * out_t + (h * out_h)[:, None] + d, value, mask=mask)


def serves(read: LayerRead) -> bool:
    """Return whether torch's flash attention computes this layer.

    The limits are those of its forward function, see `mha_varlen_fwd` in torch's flash_api.cpp.
    """
    dim, value_dim = read.query_THD.shape[-1], read.values_NKOV.shape[-1]
    return (
        not read.softcap
        and read.query_THD.dtype in {torch.bfloat16, torch.float16}
        and dim == value_dim
        and dim <= _MOST_DIM
        and dim % _DIM_STEP == 0
        and is_available(read.query_THD.device)
    )


@cache
def is_available(device: torch.device) -> bool:
    """Return whether the device and torch's build have flash attention."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    )


def flash(
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
    """Compute attention, [T, H, D], and the natural log-sum-exp of its logits, float32 [H, T].

    The rows are packed prompt by prompt, with cumulative int32 offsets [G + 1]. A prompt's last
    token has the last key as its own, and a token one before has the key before.
    """
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward.default(  # noqa: SLF001  # has no other name
        query_THD,
        key_CKD,
        value_CKD,
        cu_tokens_G1,
        cu_keys_G1,
        most_tokens,
        most_keys,
        0.0,  # dropout
        mask.right == 0,  # causal, aligned to the lower right
        False,  # noqa: FBT003  # no mask for debugging
        scale=scaling,
        window_size_left=mask.left,
        window_size_right=mask.right,
    )
    return out_THD, lse_HT


@cache
def serves_long_prompts(device: torch.device) -> bool:
    """Return whether flash attention 4 reads long prompts, by a trial at the first call."""
    return is_installed(device) and is_better(device, flash_4, flash)


def flash_part(
    read: LayerRead, group: PromptGroup, query_THD: Tensor, key_CKD: Tensor, value_CKD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a group's output, [T, H, D], and its log-sum-exp, float32 [H, T], in packed rows."""
    attention = flash
    is_long = len(query_THD) >= LEAST_TOKENS and not group.is_padded
    if is_long and serves_long_prompts(query_THD.device):
        attention = flash_4
    return attention(
        query_THD,
        key_CKD,
        value_CKD,
        group.cu_tokens_G1,
        group.cu_keys_G1,
        group.most_tokens,
        group.most_keys,
        read.scaling,
        group.mask,
    )


def flash_attend(
    read: LayerRead,
    group: PromptGroup,
    query_THD: Tensor,
    key_CKD: Tensor,
    value_CKD: Tensor,
    out_RHD: Tensor,
) -> None:
    """Write a group's output to its rows of `out_RHD`, R = flat rows. No other row is changed."""
    packed_THD, lse_HT = flash_part(read, group, query_THD, key_CKD, value_CKD)
    num_tokens, num_heads, dim = query_THD.shape
    heads = heads_at_once(num_heads, dim)
    _place[(num_tokens, -(-num_heads // heads))](
        packed_THD, lse_HT, lse_HT if read.sinks_H is None else read.sinks_H, group.row_T, out_RHD,
        *out_RHD.stride()[:2],
        HEADS=num_heads, DIM=dim, HEADS_2=heads, DIM_2=padded(dim),
        SUNK=read.sinks_H is not None,
    )  # fmt: skip
