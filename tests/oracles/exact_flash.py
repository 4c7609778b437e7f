"""The stand-in of torch's flash attention where there is no GPU: the same arguments, in float64."""

from itertools import pairwise

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.prompt_groups import Mask


def exact_flash(  # noqa: PLR0917  # as torch has them
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
    """The output in the query's dtype, and the log-sum-exp as float32.

    The arguments are checked as torch checks them, and a prompt's mask is written out.
    """
    for packed in (query_THD, key_CKD, value_CKD):
        assert packed.dtype == query_THD.dtype in {torch.float16, torch.bfloat16}
        assert packed.stride(-1) == 1
        assert packed.shape[-1] == query_THD.shape[-1] <= 256
        assert packed.shape[-1] % 8 == 0
    assert query_THD.shape[1] % key_CKD.shape[1] == 0
    tokens, keys = cu_tokens_G1.tolist(), cu_keys_G1.tolist()
    for offsets, packed in ((cu_tokens_G1, query_THD), (cu_keys_G1, key_CKD)):
        assert offsets.dtype == torch.int32
        assert offsets.is_contiguous()
        assert (int(offsets[0]), int(offsets[-1])) == (0, len(packed))
    assert most_tokens == max(end - begin for begin, end in pairwise(tokens))
    assert most_keys == max(end - begin for begin, end in pairwise(keys))
    group = query_THD.shape[1] // key_CKD.shape[1]
    outs, lses = [], []
    for prompt in range(len(tokens) - 1):
        query_QHD = query_THD[tokens[prompt] : tokens[prompt + 1]].double()
        rows = slice(keys[prompt], keys[prompt + 1])
        key_CHD = key_CKD[rows].double().repeat_interleave(group, 1)
        value_CHD = value_CKD[rows].double().repeat_interleave(group, 1)
        logits_HQC = torch.einsum("qhd,chd->hqc", query_QHD, key_CHD) * scaling
        num_tokens, num_keys = len(query_QHD), len(key_CHD)
        own_Q = torch.arange(num_tokens, device=query_THD.device) + num_keys - num_tokens
        distance_QC = own_Q[:, None] - torch.arange(num_keys, device=query_THD.device)
        hidden_QC = torch.zeros_like(distance_QC, dtype=torch.bool)
        if mask.right >= 0:
            hidden_QC |= distance_QC < -mask.right
        if mask.left >= 0:
            hidden_QC |= distance_QC > mask.left
        logits_HQC = logits_HQC.masked_fill(hidden_QC, -torch.inf)
        outs.append(torch.einsum("hqc,chd->qhd", logits_HQC.softmax(-1), value_CHD))
        lses.append(logits_HQC.logsumexp(-1))
    return torch.cat(outs).to(query_THD.dtype), torch.cat(lses, 1).float()
