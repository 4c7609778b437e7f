"""A network that copies before it has learned anything: an induction circuit, planted by hand.

Retrieval rests on two heads in a row (Olsson and others, 2022, "In-context learning and induction
heads"): one that writes into each position what the token before it was, and one that looks for the
positions whose predecessor is the current token, and copies what stands there. Found by training
alone, the pair costs about 4 million tokens on a plateau. Planted, training begins with it, and
keeps, sharpens or discards it.

Layer 0, key head 0: every key is the same vector, and query head j of its group is that vector
turned back by j + 1 positions, so under rotation the score peaks at distance j + 1, whatever the
tokens are. What is the same in every token is one constant dimension of the embedding. Layer 1, key
head 0: queries hold the current token's embedding, keys the predecessor's that layer 0 wrote, both
in the slow half of the pairs, where rotation hardly tells distances apart.
"""

import math

import torch
from torch import Tensor

from training.network import Attention, Layer, Network, frequencies

_EMBEDDING_STD = 0.02
_CONSTANT = 8.0  # the constant dimension, in standard deviations of the others
_NEIGHBOUR_SCORE = 40.0  # squared length of layer 0's vectors: how sharply it picks one position
_MATCH_GAIN = 2.3  # of queries and keys in layer 1
_COPY_GAIN = 2.0  # of what layer 1 writes, in embeddings
_REST = 0.1  # what is left of the random start beside the planted part


@torch.no_grad()
def plant_induction(network: Network, seed: int) -> None:
    """Write the circuit into layers 0 and 1 of a network that was just made."""
    shape = network.shape
    generator = torch.Generator().manual_seed(seed)
    group = shape.heads // shape.kv_heads
    network.embed_tokens.weight[:, 0] = _CONSTANT * _EMBEDDING_STD

    first, second = (_attention(network, index) for index in (0, 1))
    _look_back(network, first, group)
    # The dimensions in which a token is carried: read (V), kept apart by distance (O), copied (U).
    read_ED = _directions(shape.head_dim, shape.hidden, generator)
    kept_GD = _directions(group * shape.head_dim, shape.hidden, generator)
    copied_ED = _directions(shape.head_dim, shape.hidden, generator)

    head = slice(0, shape.head_dim)
    first.v_proj.weight[head] = read_ED
    loudness = _EMBEDDING_STD * math.sqrt(shape.hidden / shape.head_dim)
    first.o_proj.weight[:, : group * shape.head_dim] = kept_GD.T * loudness

    half, quarter = shape.head_dim // 2, shape.head_dim // 4
    slow = torch.cat([torch.arange(quarter, half), torch.arange(quarter, half) + half])
    second.k_proj.weight[head] *= _REST
    second.k_proj.weight[slow] = _MATCH_GAIN * kept_GD[: len(slow)]
    for index in range(group):
        rows = slice(index * shape.head_dim, (index + 1) * shape.head_dim)
        second.q_proj.weight[rows] *= _REST
        second.q_proj.weight[slow + rows.start] = _MATCH_GAIN * read_ED[: len(slow)]
    second.v_proj.weight[head] = copied_ED
    second.o_proj.weight[:, head] = copied_ED.T * _COPY_GAIN * _EMBEDDING_STD


def _look_back(network: Network, attention: Attention, group: int) -> None:
    """Query head j attends to the token j + 1 positions back, for any tokens."""
    shape = network.shape
    half = shape.head_dim // 2
    # The constant as it leaves the norm: its share of a vector whose mean square is 1.
    constant = _CONSTANT / math.sqrt(1 + _CONSTANT**2 / shape.hidden)
    length = math.sqrt(_NEIGHBOUR_SCORE) / constant
    frequency_P = frequencies(shape)
    attention.k_proj.weight[: shape.head_dim] *= _REST
    attention.k_proj.weight[:half, 0] = length
    for index in range(group):
        at = index * shape.head_dim
        angle_P = frequency_P * (index + 1)
        attention.q_proj.weight[at : at + shape.head_dim] *= _REST
        attention.q_proj.weight[at : at + half, 0] = length * angle_P.cos()
        attention.q_proj.weight[at + half : at + shape.head_dim, 0] = -length * angle_P.sin()


def _attention(network: Network, index: int) -> Attention:
    layer = network.layers[index]
    assert isinstance(layer, Layer)
    return layer.self_attn


def _directions(count: int, hidden: int, generator: torch.Generator) -> Tensor:
    """`count` orthonormal rows that leave the constant dimension alone: [count, hidden]."""
    square = torch.randn(hidden - 1, count, generator=generator)
    rows = torch.linalg.qr(square)[0].T
    return torch.cat([torch.zeros(count, 1), rows], dim=1)
