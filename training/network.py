"""The network for training: transformers' Llama, written out for one CPU thread.

Weights are float32, and products are bfloat16. One thread computes them about four times as fast as
float32 products. Parameters have transformers' names, so `export.py` only copies them.

Shapes: B = windows, T = tokens, D = hidden, H = query heads, K = key heads, E = head dimension,
P = E / 2 pairs, V = vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.shape import Shape

_EMBEDDING_STD = 0.02
_MATRIX_GAIN = 0.6  # standard deviation of a matrix, in units of 1 / sqrt(width)


class Attention(nn.Module):
    """The projections of one layer; `Network` computes the attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, key, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, key, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)


class FeedForward(nn.Module):
    """The gated layer of Llama (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)): [B, T, D], bfloat16."""
        gate = functional.silu(_product(x_BTD, self.gate_proj))
        return _product(gate * _product(x_BTD, self.up_proj), self.down_proj)


class Norm(nn.Module):
    """An RMSNorm, computed in float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self._eps = shape.norm_eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the norm of a float32 input in bfloat16: [B, T, D]."""
        scale = torch.rsqrt(x_BTD.pow(2).mean(-1, keepdim=True) + self._eps)
        return (x_BTD * scale * self.weight).bfloat16()


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)


class Network(nn.Module):
    """A Llama whose forward returns the loss of each next token."""

    cos_TP: Tensor
    sin_TP: Tensor
    future_TT: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        angle_TP = torch.outer(torch.arange(shape.native_len).float(), frequencies(shape))
        future = torch.ones(shape.native_len, shape.native_len, dtype=torch.bool).triu(1)
        self.register_buffer("cos_TP", angle_TP.cos(), persistent=False)
        self.register_buffer("sin_TP", angle_TP.sin(), persistent=False)
        self.register_buffer("future_TT", future, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw the weights; output projections and biases are zero, so layers add nothing yet."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(parameter)
            elif "embed_tokens" in name:
                nn.init.normal_(parameter, std=_EMBEDDING_STD)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=_MATRIX_GAIN / math.sqrt(parameter.shape[1]))

    def forward(self, tokens_BT: Tensor, next_BT: Tensor) -> Tensor:
        """Return the cross entropy of every next token, in nats: [B, T], float32."""
        hidden_BTD = functional.embedding(tokens_BT, self.embed_tokens.weight)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attended = self._attend(layer.input_layernorm(hidden_BTD), layer.self_attn)
            hidden_BTD = hidden_BTD + attended.float()
            added = layer.mlp(layer.post_attention_layernorm(hidden_BTD))
            hidden_BTD = hidden_BTD + added.float()
        logits_BTV = functional.linear(
            self.norm(hidden_BTD), self.embed_tokens.weight.bfloat16()
        ).float()
        return functional.cross_entropy(logits_BTV.transpose(1, 2), next_BT, reduction="none")

    def _attend(self, x_BTD: Tensor, attention: Attention) -> Tensor:
        """Compute causal attention with an explicit mask: [B, T, D], bfloat16.

        torch's own attention has a slower backward pass on a CPU.
        """
        shape = self.shape
        B, T, _ = x_BTD.shape
        q_BHTE = self._rotated(_heads(_product(x_BTD, attention.q_proj), shape.head_dim))
        k_BKTE = self._rotated(_heads(_product(x_BTD, attention.k_proj), shape.head_dim))
        v_BKTE = _heads(_product(x_BTD, attention.v_proj), shape.head_dim)
        group = shape.heads // shape.kv_heads
        k_BHTE = k_BKTE.repeat_interleave(group, 1)
        v_BHTE = v_BKTE.repeat_interleave(group, 1)
        scores = (q_BHTE @ k_BHTE.transpose(2, 3)).float() / math.sqrt(shape.head_dim)
        scores = scores.masked_fill(self.future_TT[:T, :T], -1e9)
        read = scores.softmax(-1).bfloat16() @ v_BHTE
        return _product(read.transpose(1, 2).reshape(B, T, -1), attention.o_proj)

    def _rotated(self, x_BHTE: Tensor) -> Tensor:
        """Rotate half-split pairs, as transformers' Llama does; return bfloat16."""
        x = x_BHTE.float()
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        T = x.shape[2]
        cos, sin = self.cos_TP[:T], self.sin_TP[:T]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(turned, -1).bfloat16()


def frequencies(shape: Shape) -> Tensor:
    """Return the angle per token of each pair, in radians: [P]."""
    exponent_P = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    return shape.rope_theta**-exponent_P


def _product(x_BTD: Tensor, linear: nn.Linear) -> Tensor:
    bias = None if linear.bias is None else linear.bias.bfloat16()
    return functional.linear(x_BTD, linear.weight.bfloat16(), bias)


def _heads(x_BTD: Tensor, head_dim: int) -> Tensor:
    B, T, _ = x_BTD.shape
    return x_BTD.view(B, T, -1, head_dim).transpose(1, 2)
