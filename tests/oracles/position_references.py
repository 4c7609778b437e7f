"""The forward of a Llama in float64, with attention as the authors of position methods compute it.

Each reference is written again from its source, in the source's own way: two score matrices and a
mask, pieces and their log-sum-exp, or positions in a cache. None of them knows ranges.

Shapes: H = query heads, K = key heads, T = tokens, D = dimensions of a head, E = of the model.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Unrotated queries and keys [H, T, D], values [H, T, D] and frequencies to an output [H, T, D].
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def rotated(x_HTD: Tensor, positions_T: Tensor, inv_freq_P: Tensor) -> Tensor:
    """Vectors at these positions."""
    angle_TP = positions_T.double()[:, None] * inv_freq_P
    cos_TD, sin_TD = (torch.cat((each, each), -1) for each in (angle_TP.cos(), angle_TP.sin()))
    first, second = x_HTD.chunk(2, -1)
    return x_HTD * cos_TD + torch.cat((-second, first), -1) * sin_TD


def _attended(scores_HTT: Tensor, v_HTD: Tensor) -> Tensor:
    num_tokens = v_HTD.shape[1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return (scores_HTT / math.sqrt(v_HTD.shape[-1])).masked_fill(future, -math.inf).softmax(
        -1
    ) @ v_HTD


def rerope(window: int, training_length: int) -> Attention:
    """bojone/rerope acfe788, rerope_patch.py: eager, with its log-n."""

    def attend(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, inv_freq_P: Tensor) -> Tensor:
        at_T = torch.arange(q_HTD.shape[1])
        logn_T = ((at_T + 1).double().log() / math.log(training_length)).clamp(min=1)
        q_HTD = q_HTD * logn_T[:, None]
        near = rotated(q_HTD, at_T, inv_freq_P) @ rotated(k_HTD, at_T, inv_freq_P).mT
        far = rotated(q_HTD, at_T * 0 + window, inv_freq_P) @ k_HTD.mT
        is_near_TT = (at_T[:, None] - at_T).abs() < window
        return _attended(torch.where(is_near_TT, near, far), v_HTD)

    return attend


def self_extend(neighbours: int, group: int) -> Attention:
    """datamllab/LongLM cdbbb06, the eager patch; w / G is whole here, where its variants agree."""

    def attend(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, inv_freq_P: Tensor) -> Tensor:
        num_tokens = q_HTD.shape[1]
        at_T = torch.arange(num_tokens)
        near = rotated(q_HTD, at_T, inv_freq_P) @ rotated(k_HTD, at_T, inv_freq_P).mT
        group_q_T = at_T // group + neighbours - neighbours // group
        far = rotated(q_HTD, group_q_T, inv_freq_P) @ rotated(k_HTD, at_T // group, inv_freq_P).mT
        is_far_TT = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        rest = max(0, num_tokens - neighbours)
        is_far_TT[neighbours:, :rest] = torch.ones(rest, rest, dtype=torch.bool).tril()
        return _attended(torch.where(is_far_TT, far, near), v_HTD)

    return attend


def string(shift: int, window: int) -> Attention:
    """HKUNLP/STRING 216cc2f, its decode: at distance S the shifted position begins."""

    def attend(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, inv_freq_P: Tensor) -> Tensor:
        at_T = torch.arange(q_HTD.shape[1])
        keys = rotated(k_HTD, at_T, inv_freq_P)
        near = rotated(q_HTD, at_T, inv_freq_P) @ keys.mT
        far = rotated(q_HTD, at_T - shift + window, inv_freq_P) @ keys.mT
        return _attended(torch.where(at_T[:, None] - at_T >= shift, far, near), v_HTD)

    return attend


def sinks(num_sinks: int, recent: int) -> Attention:
    """mit-han-lab/streaming-llm 2e50426: token by token, positions are places in the cache."""

    def attend(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, inv_freq_P: Tensor) -> Tensor:
        rows, kept = [], list[int]()
        for p in range(q_HTD.shape[1]):
            kept.append(p)
            if len(kept) > num_sinks + recent:
                kept = kept[:num_sinks] + kept[-recent:]
            at_T = torch.arange(len(kept))
            keys = rotated(k_HTD[:, kept], at_T, inv_freq_P)
            query = rotated(q_HTD[:, p : p + 1], at_T[-1:], inv_freq_P)
            weights = (query @ keys.mT / math.sqrt(q_HTD.shape[-1])).softmax(-1)
            rows.append(weights @ v_HTD[:, kept])
        return torch.cat(rows, 1)

    return attend


def dual_chunk(chunk_size: int, local_size: int, logit_scale: float = 1.0) -> Attention:
    """HKUNLP/ChunkLlama 2add4d7: chunk by chunk, three parts merged by their log-sum-exp.

    Qwen2.5-1M in vLLM 0.8.5 has the same parts, with logits times s squared.
    """
    chunk = chunk_size - local_size

    def part(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, *, is_causal: bool) -> Any:
        scores = q_HTD @ k_HTD.mT * (logit_scale / math.sqrt(q_HTD.shape[-1]))
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return scores.softmax(-1) @ v_HTD, scores.logsumexp(-1, keepdim=True)

    def attend(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, inv_freq_P: Tensor) -> Tensor:
        num_tokens = q_HTD.shape[1]
        in_chunk_T = torch.arange(num_tokens) % chunk
        succeeding_T = (torch.arange(chunk) + chunk).clamp(max=chunk_size)
        keys = rotated(k_HTD, in_chunk_T, inv_freq_P)
        outputs = []
        for begin in range(0, num_tokens, chunk):
            own = slice(begin, min(begin + chunk, num_tokens))
            at_T, queries = in_chunk_T[own], q_HTD[:, own]
            intra = rotated(queries, at_T, inv_freq_P)
            parts = [part(intra, keys[:, own], v_HTD[:, own], is_causal=True)]
            if begin:
                before = slice(begin - chunk, begin)
                succ = rotated(queries, succeeding_T[at_T], inv_freq_P)
                parts.append(part(succ, keys[:, before], v_HTD[:, before], is_causal=False))
            if begin > chunk:
                far = slice(0, begin - chunk)
                inter = rotated(queries, succeeding_T[-1].expand_as(at_T), inv_freq_P)
                parts.append(part(inter, keys[:, far], v_HTD[:, far], is_causal=False))
            weights = torch.stack([lse for _, lse in parts]).softmax(0)
            outputs.append((weights * torch.stack([out for out, _ in parts])).sum(0))
        return torch.cat(outputs, 1)

    return attend


def llama_logits(model: Any, token_ids: list[int], attention: Attention) -> Tensor:
    """The logits [T, vocabulary] of an untouched Llama under another attention, float64."""
    model = copy.deepcopy(model).double()
    config = model.config
    dim = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    inv_freq_P = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    group = config.num_attention_heads // config.num_key_value_heads
    with torch.inference_mode():
        hidden_TE = model.model.embed_tokens(torch.tensor(token_ids))
        for layer in model.model.layers:
            normal_TE, own = layer.input_layernorm(hidden_TE), layer.self_attn
            q_HTD, k_KTD, v_KTD = (
                each(normal_TE).unflatten(-1, (-1, dim)).transpose(0, 1)
                for each in (own.q_proj, own.k_proj, own.v_proj)
            )
            k_HTD, v_HTD = (each.repeat_interleave(group, 0) for each in (k_KTD, v_KTD))
            out_HTD = attention(q_HTD, k_HTD, v_HTD, inv_freq_P)
            hidden_TE = hidden_TE + own.o_proj(out_HTD.transpose(0, 1).flatten(1))
            hidden_TE = hidden_TE + layer.mlp(layer.post_attention_layernorm(hidden_TE))
        logits_TV: Tensor = model.lm_head(model.model.norm(hidden_TE))
    return logits_TV
