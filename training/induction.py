"""Initial weights with an induction circuit, written by hand, so that the network copies untrained.

Retrieval rests on two heads in successive layers (Olsson and others, 2022, "In-context learning and
induction heads"). The first head writes into each position which token came before it. The second
head finds the positions whose predecessor is the current token, and copies the tokens there. If
training must find the pair alone, it spends about 4 million tokens on a plateau. If the pair is
planted, training begins with it, and keeps, sharpens or discards it.

Layer 0, key head 0: every key is the same vector. It comes from one dimension of the embedding that
is constant over all tokens. Query head j of the group is that vector, rotated back by j + 1
positions. Under rotation the score then peaks at distance j + 1 for any tokens.

Layer 1, key head 0: queries hold the embedding of the current token. Keys hold the embedding of the
token before, which layer 0 wrote. Both use the slow half of the pairs, because rotation hardly
changes a score with distance there.
"""

import math

import torch
from torch import Tensor

from training.network import Attention, Layer, Network, frequencies

_EMBEDDING_STD = 0.02
_CONSTANT = 8.0  # value of the constant dimension, in standard deviations of the others
_NEIGHBOUR_SCORE = 40.0  # squared length of layer 0's vectors; more selects more sharply
_MATCH_GAIN = 2.3  # scale of queries and keys in layer 1
_COPY_GAIN = 2.0  # scale of layer 1's output, relative to an embedding
_REST = 0.1  # factor on the random weights beside the planted ones


@torch.no_grad()
def plant_induction(network: Network, seed: int) -> None:
    """Write the circuit into layers 0 and 1 of a network that is not trained yet."""
    shape = network.shape
    generator = torch.Generator().manual_seed(seed)
    group = shape.heads // shape.kv_heads
    network.embed_tokens.weight[:, 0] = _CONSTANT * _EMBEDDING_STD

    first, second = (_attention(network, index) for index in (0, 1))
    _look_back(network, first, group)
    # Directions that carry a token: values of layer 0, its outputs by distance, copies of layer 1.
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
    """Make query head j attend to the token j + 1 positions back, whatever the tokens are."""
    shape = network.shape
    half = shape.head_dim // 2
    # The constant after the norm, which scales a vector to a mean square of 1.
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
    """Draw `count` orthonormal rows, [count, hidden], that are 0 in the constant dimension."""
    square = torch.randn(hidden - 1, count, generator=generator)
    rows = torch.linalg.qr(square)[0].T
    return torch.cat([torch.zeros(count, 1), rows], dim=1)
