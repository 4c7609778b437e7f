"""Read the weights of a file as codes on a device, one tensor at a time.

Shapes: N = outputs, K = inputs, B = blocks of inputs, G = groups of inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import Format
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.codes import Cells, Codes, packed, stacked
from ropewalk.model_runtime.formats.dequantise import codes_of, parts_of, planned_parts
from ropewalk.model_runtime.formats.gguf.gguf_blocks import Blocks
from ropewalk.model_runtime.formats.quantised_inventory import Inventory, QuantisedWeight
from ropewalk.model_runtime.layers.experts.router_names import is_router
from ropewalk.model_runtime.loading.low_bits.hold import (
    expert_holders,
    expert_matrices,
    holders,
)

# The linears of one expert in files: those of the first product, and that of the second.
_LINEARS = (("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",))
_PLACES = (".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe.")  # of experts in models and in files

# By the names of a layer's parameters: the parts of a matrix, and the files' weights of each.
ExpertParts = dict[str, tuple[tuple[QuantisedWeight, ...], ...]]


class StoredWeights:
    """The weights of quantised safetensors that a model's modules can hold as codes."""

    def __init__(self, model: Any, inventory: Inventory) -> None:
        """Match the files' weights to modules. `model` needs no weights."""
        self._stored = {each.name: each for each in inventory.quantised}
        self.linears = {
            name: self._stored[name]
            for name, module in holders(model).items()
            if name in self._stored
            and self._stored[name].shape == tuple(module.weight.shape)
            and not is_router(name.removesuffix(".weight"))
        }
        self.experts = {
            name: found
            for name, module in expert_holders(model).items()
            if (found := self._of_experts(name, module)) is not None
        }

    def names(self) -> set[str]:
        """Return the names of the files' weights that are held."""
        experts = (each for found in self.experts.values() for each in found.values())
        return {*self.linears, *(one.name for parts in experts for each in parts for one in each)}

    def read(
        self, paths: Sequence[Path] | None, device: torch.device
    ) -> tuple[dict[str, Codes], dict[str, dict[str, tuple[Codes, ...]]]]:
        """Return the codes of linears by weight, and of experts by layer. Raises ModelError.

        No paths: codes without memory.
        """
        with ExitStack() as opened:
            files = {
                path: opened.enter_context(safe_open(path, framework="pt")) for path in paths or ()
            }

            def read(weight: QuantisedWeight) -> Codes:
                if paths is None:
                    return codes_of(weight, planned_parts(weight))
                parts = parts_of(files, weight)
                codes = codes_of(weight, {role: each.to(device) for role, each in parts.items()})
                if not codes.is_finite():
                    raise ModelError(f"{weight.parts['values'].path}: {weight.name} has NaN or Inf")
                return codes

            linears = {name: read(each) for name, each in self.linears.items()}
            experts = {
                name: {
                    key: tuple(
                        read(part[0]) if len(part) == 1 else stacked(list(map(read, part)))
                        for part in parts
                    )
                    for key, parts in found.items()
                }
                for name, found in self.experts.items()
            }
        return linears, experts

    def _of_experts(self, name: str, module: Any) -> ExpertParts | None:
        """Return the files' weights of both products: one of all experts, or one of each."""
        names = expert_matrices(module)
        whole = [self._stored.get(f"{name}.{each}") for each in names]
        if all(whole):
            is_ours = all(
                one is not None
                and one.shape == tuple(getattr(module, each).shape)
                and module.is_transposed == (one.group.layout == "mxfp4")
                for one, each in zip(whole, names, strict=True)
            )
            found: ExpertParts = {
                key: ((one,),) for key, one in zip(names, whole, strict=True) if one
            }
            return found if is_ours else None
        if not (module.has_gate and module.is_concatenated) or module.is_transposed:
            return None
        num_experts = len(getattr(module, names[0]))
        for linears in _LINEARS:
            for own, other in _PLACES:
                where = name.replace(own, other)
                parts = [
                    [
                        tuple(
                            self._stored.get(f"{where}.{index}.{each}.weight")
                            for index in range(num_experts)
                        )
                        for each in product
                    ]
                    for product in linears
                ]
                if all(one for product in parts for each in product for one in each):
                    return _alike(dict(zip(names, parts, strict=True)))
        return None


def _alike(found: Mapping[str, Any]) -> ExpertParts | None:
    """Return the weights of experts, if all of a part have one format and one shape."""
    for product in found.values():
        for part in product:
            if len({(each.shape, each.group, each.grid, *each.parts) for each in part}) > 1:
                return None
    return {key: tuple(product) for key, product in found.items()}


def blocks_as_codes(
    kind: Format,
    shape: tuple[int, int],
    pieces: Iterable[tuple[int, Blocks]] | None,
    device: torch.device,
) -> Codes:
    """Return the codes of a tensor of a GGUF file from the numbers of its rows, in pieces.

    No pieces: codes without memory.
    """
    place = torch.device("meta") if pieces is None else torch.device("cpu")
    fields = _memory(kind, shape, place)
    for first, blocks in pieces or ():
        for name, each in _piece(kind, blocks).items():
            fields[name][first : first + len(each)] = each
    target = place if pieces is None else device
    fields = {name: each.to(target) for name, each in fields.items()}
    if kind.has_powers:
        fields["factors_NB"] = fields["factors_NB"].view(torch.float8_e8m0fnu)
    table = None
    if kind.table:
        halved = 2 if kind.has_powers else 1  # exponents are too large by 128, those of E8M0 by 127
        table = torch.tensor([(each - kind.zero) / halved for each in kind.table]).to(target)
    return Codes(
        "Q8_0" if kind.bits == 8 else kind.name,
        kind.bits,
        *shape,
        fields["lower"],
        _cells(kind, fields, "factors_NB", "scales_NG"),
        upper=fields.get("upper"),
        zero=0 if kind.table else kind.zero,
        minimum=_cells(kind, fields, "minima_NB", "group_minima_NG"),
        table=table,
    )


def _memory(kind: Format, shape: tuple[int, int], place: torch.device) -> dict[str, Tensor]:
    """Return tensors for the numbers of all rows, by what they hold."""
    num_outputs, num_inputs = shape
    num_blocks, num_groups = num_inputs // kind.block, num_inputs // kind.group
    signed = torch.uint8 if kind.has_minimum else torch.int8
    widths = {
        "lower": (
            num_inputs * kind.lower_bits // 8,
            torch.int8 if kind.bits == 8 else torch.uint8,  # bits
        ),
        "upper": (num_inputs * kind.upper_bits // 8, torch.uint8),
        "factors_NB": (num_blocks, torch.uint8 if kind.has_powers else torch.float16),
        "minima_NB": (num_blocks * kind.has_minimum, torch.float16),
        "scales_NG": (num_groups * bool(kind.scale_bits), signed),
        "group_minima_NG": (num_groups * (kind.has_minimum and bool(kind.scale_bits)), torch.uint8),
    }
    return {
        name: torch.empty(num_outputs, width, dtype=dtype, device=place)
        for name, (width, dtype) in widths.items()
        if width
    }


def _piece(kind: Format, blocks: Blocks) -> dict[str, Tensor]:
    """Return the numbers of some rows as they are stored."""
    q_NK = torch.from_numpy(blocks.q_NK)
    found = {"lower": q_NK}
    if kind.bits < 8:  # bits
        found["lower"] = packed(q_NK & ((1 << kind.lower_bits) - 1), kind.lower_bits)
    if kind.upper_bits:
        found["upper"] = packed(q_NK >> kind.lower_bits, kind.upper_bits)
    for name in ("factors_NB", "minima_NB", "scales_NG", "group_minima_NG"):
        numbers = getattr(blocks, name)
        if numbers is not None:
            found[name] = torch.from_numpy(numbers)
    return found


def _cells(
    kind: Format, fields: Mapping[str, Tensor], of_blocks: str, of_groups: str
) -> tuple[Cells, ...]:
    columns = {of_blocks: kind.block, of_groups: kind.group}
    return tuple(Cells(fields[name], 1, width) for name, width in columns.items() if name in fields)
