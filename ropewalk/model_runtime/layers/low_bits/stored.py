"""Modules whose weights stay in the bits of a file on a GPU, and widen them while they multiply.

A module's weight *is* its widened weight in the served number type, as it would be dequantised at
load. `multiply` of a linear may be replaced by another product of the same weight (`executors.py`).
All operations are torch's, so the modules work on any device.

Shapes: R = rows, C = choices of a row, S = choices of all rows, sorted by expert, E = experts,
K = inputs, N = outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.formats.codes import Codes
from ropewalk.model_runtime.layers.joined_linears import placeholder
from ropewalk.model_runtime.layers.replace_modules import Replacement

_AT_ONCE = 1 << 24  # numbers that are widened to scratch at a time
_OF_EXPERTS_AT_ONCE = 1 << 26  # numbers of all experts
# Rows that all experts multiply, so that a decode can be captured on any card. It takes less time
# than widening the experts.
_MOST_MULTIPLIED = 512

Multiply = Callable[[Tensor, Tensor | None], Tensor]  # of inputs and a bias
# Of rows sorted by expert, [S, K], and the place behind the last row of each expert, int32 [E].
Grouped = Callable[[Tensor, Tensor], Tensor]


def widened_product(codes: Codes, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply inputs [..., K] by a weight that is widened some outputs at a time."""
    if codes.order is not None:
        x = x.index_select(-1, codes.order)
    parts = []
    for first, end in codes.pieces(_AT_ONCE):
        part = None if bias is None else bias[first:end]
        parts.append(nn.functional.linear(x, codes.widened(x.dtype, first, end), part))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def grouped_product(codes: Codes, x_SK: Tensor, end_E: Tensor) -> Tensor:
    """Multiply each row by the weight of its expert, [S, K] -> [S, N].

    In bfloat16 on Hopper and Blackwell the device is not waited for. torch 2.13 reads the number of
    each expert's rows on the host elsewhere.
    """
    place_EK = None if codes.order is None else codes.order.argsort(-1)  # of each input
    parts = []
    for first, end in codes.pieces(_OF_EXPERTS_AT_ONCE):
        weight = codes.widened(x_SK.dtype, first, end)
        if place_EK is not None:
            weight = weight.gather(-1, place_EK[:, None].expand_as(weight))
        parts.append(nn.functional.grouped_mm(x_SK, weight.mT, offs=end_E))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def ends_of(expert_S: Tensor, num_experts: int) -> Tensor:
    """Return the place behind the last row of each expert, int32 [E], without a wait."""
    experts_E = torch.arange(num_experts, dtype=expert_S.dtype, device=expert_S.device)
    return torch.searchsorted(expert_S, experts_E, right=True, out_int32=True)


def _without_memory(codes: Codes, dtype: torch.dtype) -> nn.Parameter:
    """Return a weight without rows: model code may read its dtype and its device."""
    empty = torch.empty(0, codes.num_inputs, dtype=dtype, device=codes.lower.device)
    return nn.Parameter(empty, requires_grad=False)


class StoredLinear(nn.Module):
    """A linear whose weight stays in the bits of its file."""

    is_linear: ClassVar = True  # see random_numbers.py

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Keep the codes. `dtype` is the number type of inputs and outputs."""
        super().__init__()
        self.in_features, self.out_features = codes.num_inputs, codes.num_outputs
        self.codes: Codes | None = codes  # None: another product has taken them
        self.format, self.num_bytes = codes.name, codes.num_bytes
        self.weight = _without_memory(codes, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.product_name = ""  # of another product than that of the widened weight
        self.multiply: Multiply = lambda x, bias: widened_product(codes, x, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear, [..., K] -> [..., N]."""
        return self.multiply(x, self.bias)


class StoredEmbedding(nn.Module):
    """An embedding whose rows stay in the bits of their file, perhaps with a head.

    A row is multiplied by the embedding's own scale, if it has one (Gemma).
    """

    embed_scale: Tensor | None

    def __init__(self, codes: Codes, original: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = codes.num_outputs, codes.num_inputs
        self.padding_idx = original.padding_idx
        self.codes = codes
        self.format, self.num_bytes = codes.name, codes.num_bytes
        self.weight = _without_memory(codes, original.weight.dtype)
        scale: Any = getattr(original, "embed_scale", None)
        self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the rows of token ids, [...] -> [..., K]."""
        rows = self.codes.at(input_ids.reshape(-1)).widened(self.weight.dtype)
        rows = rows.view(*input_ids.shape, self.embedding_dim)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


class StoredExperts(Replacement):
    """The experts of a layer whose weights stay in the bits of their file.

    Each matrix has one or two parts, whose outputs follow each other: gates and ups.
    """

    def __init__(self, original: Any, matrices: Mapping[str, tuple[Codes, ...]]) -> None:
        """Keep the codes [E, N, K], by the names of the original's parameters, which are freed."""
        super().__init__(original)
        self.matrices = matrices
        self.product_name = ""  # of other products than those of the widened weights
        self._products: Mapping[str, Sequence[Grouped]] = {}
        for name in matrices:
            setattr(original, name, placeholder(getattr(original, name)))
        # So that the parameters left are the model's, and move to its device.
        self.left = nn.ParameterDict(
            {name: each for name, each in original.named_parameters() if name not in matrices}
        )

    @property
    def num_experts(self) -> int:
        return len(self.matrices["down_proj"][0].lower)

    @property
    def first_name(self) -> str:
        """Return the name of the first product's matrix."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    def use(self, products: Mapping[str, Sequence[Grouped]], name: str) -> None:
        """Multiply by other products of all parts, from now on. They have taken the codes."""
        self._products, self.product_name = products, name
        self.matrices = {
            key: tuple(each.each(lambda tensor: tensor.to("meta")) for each in parts)
            for key, parts in self.matrices.items()
        }

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each row, [R, K], [R, C], [R, C] -> [R, K]."""
        num_rows, num_choices = top_k_index.shape
        if self._products or num_rows > _MOST_MULTIPLIED:
            return self._sorted(x, top_k_index, top_k_weights.float())
        out_RK = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if num_rows * num_choices < self.num_experts:
            for row in range(num_rows):
                for place in range(num_choices):
                    chosen = top_k_index[row, place : place + 1]
                    part = self._expert(chosen, x[row : row + 1]).float()
                    out_RK[row] += (part * top_k_weights[row, place])[0]
        else:
            for expert in range(self.num_experts):
                is_chosen = top_k_index == expert
                share_R1 = (top_k_weights * is_chosen).sum(-1, keepdim=True).float()
                part = self._expert(expert, x).float() * share_R1
                out_RK += torch.where(is_chosen.any(-1, keepdim=True), part, 0.0)
        return out_RK.to(x.dtype)

    def _sorted(self, x: Tensor, choice_RC: Tensor, share_RC: Tensor) -> Tensor:
        """Compute the experts with the choices of all rows sorted by expert."""
        expert_S, choice_S = choice_RC.flatten().sort()
        row_S, place_RC = choice_S // choice_RC.shape[1], choice_S.argsort().view(choice_RC.shape)
        end_E = ends_of(expert_S, self.num_experts)

        def multiplied(name: str, x_SK: Tensor) -> Tensor:
            products = self._products.get(name) or [
                partial(grouped_product, each) for each in self.matrices[name]
            ]
            return self._with_bias(name, expert_S, [each(x_SK, end_E) for each in products])

        between = self._between(multiplied(self.first_name, x.index_select(0, row_S)))
        out_SK = multiplied("down_proj", between)
        out_RK = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for place_R, share_R in zip(place_RC.t(), share_RC.t(), strict=True):
            out_RK += out_SK.index_select(0, place_R) * share_R[:, None]
        return out_RK.to(x.dtype)

    def _expert(self, expert: int | Tensor, x: Tensor) -> Tensor:
        """Compute one expert of all rows; a tensor is an index on the device, [1]."""
        return self._linear(
            "down_proj", expert, self._between(self._linear(self.first_name, expert, x))
        )

    def _between(self, both: Tensor) -> Tensor:
        own: Any = self._original[0]
        found: Tensor = own._apply_gate(both) if own.has_gate else own.act_fn(both)  # noqa: SLF001
        return found

    def _linear(self, name: str, expert: int | Tensor, x: Tensor) -> Tensor:
        parts = [widened_product(each.expert(expert), x, None) for each in self.matrices[name]]
        return self._with_bias(name, expert, parts)

    def _with_bias(self, name: str, expert: int | Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts of a product beside each other, with the bias of one expert or of S."""
        out = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)
        return out + self.left[f"{name}_bias"][expert] if self.has_bias else out

    def with_random_numbers(
        self, generator: torch.Generator, dtype: torch.dtype | None
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a forward with experts that are all equal, for a probe (random_numbers.py)."""
        drawn = []
        for name in (self.first_name, "down_proj"):
            parts = self.matrices[name]
            num_outputs, num_inputs = sum(each.num_outputs for each in parts), parts[0].num_inputs
            numbers = torch.randn(num_outputs + num_inputs, generator=generator)
            drawn.append((numbers * num_inputs**-0.5, (num_outputs, num_inputs)))

        def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            del top_k_index
            # Each row begins one number further on, so that layers together take no memory.
            first, second = (
                numbers.to(x.device).as_strided(shape, (1, 1)) for numbers, shape in drawn
            )
            out = nn.functional.linear(
                self._between(nn.functional.linear(x.float(), first)), second
            )
            return (out * top_k_weights.float().sum(-1, keepdim=True)).to(dtype or x.dtype)

        return forward
