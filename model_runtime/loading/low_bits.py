"""Which weights are stored in few bits, and how many bytes they take; neither torch nor numba."""

import ctypes
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import (
    BY_TYPE,
    INT8,
    PANEL,
    SCRATCH_BYTES,
    Format,
    block_outputs,
    panels_text,
)
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.low_bit_linear import LowBitEmbedding, LowBitLinear
from ropewalk.model_runtime.probing.untouched import logits_of, text_ids_of

Weights = Literal["stored", "int8", "dequantised"]
_FEWEST_OUTPUTS = PANEL  # fewer would pad a panel, and such linears are often routers
# Linears that read one tensor are one product. Names are those of transformers and of GGUF.
_QUERY_KEY_VALUE = re.compile(r"\b[qkv]_proj\b|\battn_[qkv]\b")
_GATE_UP = re.compile(r"\b(gate|up)_proj\b|\bffn_(gate|up)\b")
_ROUTERS = {"gate", "router"}  # linears that choose experts: an error there is not a small one


def format_of_type(type_name: str | None) -> Format | None:
    """Return the format that holds a type of GGUF in its own bits, or None."""
    return BY_TYPE.get(type_name or "")


def can_hold(name: str, shape: tuple[int, ...], kind: Format) -> bool:
    """Return whether a weight of a linear or an embedding can be stored in a format.

    `name` is the parameter's in transformers, with `.weight`.
    """
    module, _, parameter = name.rpartition(".")
    return (
        parameter == "weight"
        and len(shape) == 2
        and shape[1] % kind.block == 0
        and module.rpartition(".")[2] not in _ROUTERS
        and ".experts." not in name
    )


def can_quantise(name: str, shape: tuple[int, ...]) -> bool:
    return can_hold(name, shape, INT8) and shape[0] >= _FEWEST_OUTPUTS


@dataclass
class Storage:
    """The bytes of a model's weights, once they are stored."""

    by_format: dict[str, int] = field(default_factory=dict)  # panels, with scales
    float_bytes: int = 0
    outputs: dict[tuple[str, int], int] = field(default_factory=dict)  # by product and inputs
    # Outputs of floats, by product and inputs: some of them join products of few bits.
    float_outputs: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: Format | None,
        itemsize: int,
        *,
        is_product: bool = True,
    ) -> None:
        """Count a weight; `kind` None means a float of `itemsize` bytes.

        `is_product` is false for an embedding whose weight is no head's.
        """
        if kind is None:
            self.float_bytes += prod(shape) * itemsize
            self.add_float_outputs(name, shape)
            return
        num_bytes = kind.num_bytes(shape[0], shape[1])
        self.by_format[kind.name] = self.by_format.get(kind.name, 0) + num_bytes
        if is_product:
            key = _product(name), shape[1]
            self.outputs[key] = self.outputs.get(key, 0) + shape[0]

    def add_float_outputs(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) == 2 and _product(name) != name:
            key = _product(name), shape[1]
            self.float_outputs[key] = self.float_outputs.get(key, 0) + shape[0]

    @property
    def scratch_bytes(self) -> int:
        """Return the size of the memory for widened weights."""
        blocks = {
            (block_outputs(found + self.float_outputs.get(key, 0), key[1], SCRATCH_BYTES), key[1])
            for key, found in self.outputs.items()
        }
        return sum(4 * num_outputs * num_inputs for num_outputs, num_inputs in blocks)

    @property
    def num_bytes(self) -> int:
        return sum(self.by_format.values()) + self.float_bytes + self.scratch_bytes

    @property
    def formats(self) -> str:
        """Return the names of the formats, most bytes first."""
        return " and ".join(sorted(self.by_format, key=lambda name: -self.by_format[name]))

    @property
    def products(self) -> str:
        """Return how weights in few bits are multiplied, for the banner."""
        return panels_text(self.formats)


def _product(name: str) -> str:
    """Return the name of the product that a linear is a part of."""
    return _GATE_UP.sub("gate_up", _QUERY_KEY_VALUE.sub("qkv", name))


def refuse_int8(device_type: str, *, is_divided: bool) -> None:
    """Raise ModelError if the kernels of int8 do not serve this device or several processes."""
    if device_type != "cpu":
        raise ModelError(f"weights: int8 is served on a CPU only, the device is {device_type}")
    if is_divided:
        raise ModelError(
            "weights: int8 is not divided among processes; tensor_parallel_size must be 1"
        )


if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels


def holders(model: Any) -> dict[str, Any]:
    """Return the modules whose weight may be stored in few bits, by the name of the weight.

    Beside linears this is the embedding of tokens, if it only looks rows up and scales them. A tied
    head is not listed, because it has the embedding's weight. Modules that hold few bits already
    are not listed either.
    """
    embedding = model.get_input_embeddings()
    is_float = isinstance(embedding, nn.Embedding)
    is_plain = type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale")
    tied = getattr(embedding, "weight", None)
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear and module.weight is not tied
        is_rows = is_float and is_plain and module is embedding and embedding.max_norm is None
        if is_linear or is_rows:
            found[f"{name}.weight"] = module
    return found


def hold(model: Any, panels: Mapping[str, "LowBitPanels"]) -> None:
    """Give modules their panels, by the name of the weight, in place. Their floats are freed."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and type(head) is nn.Linear and head.weight is embedding.weight
    for name, each in panels.items():
        where = name.removesuffix(".weight")
        module = model.get_submodule(where)
        dtype = module.weight.dtype
        if module is not embedding:
            model.set_submodule(where, LowBitLinear(each, module.bias, dtype))
            continue
        model.set_submodule(where, LowBitEmbedding(each, module))
        if is_tied:
            model.set_output_embeddings(LowBitLinear(each, head.bias, dtype))


def quantisable(model: Any) -> list[str]:
    found = holders(model).items()
    return [name for name, each in found if can_quantise(name, tuple(each.weight.shape))]


def storage_of(model: Any) -> Storage:
    """Return the storage of a model whose modules have their panels, before it is packed."""
    found, seen = Storage(), set()
    modules = list(model.named_modules())
    # A tied head comes first, because only it is a product.
    for kind in (LowBitLinear, LowBitEmbedding):
        for name, module in modules:
            if isinstance(module, kind) and id(module.panels) not in seen:
                panels = module.panels
                seen.add(id(panels))
                shape = panels.num_outputs, panels.num_inputs
                is_product = kind is LowBitLinear
                found.add(name, shape, panels.kind, 0, is_product=is_product)
    for name, module in modules:
        if type(module) is nn.Linear:
            found.add_float_outputs(f"{name}.weight", tuple(module.weight.shape))
    found.float_bytes = sum(each.nbytes for each in model.parameters())
    return found


def return_freed_memory() -> None:
    """Return memory that was freed to the system, where the C library keeps it (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# Quantise a loaded model to int8, and measure how far its answers are from those before.
#
# Shapes: T = tokens of the text, V = vocabulary.

_MOST_TOKENS = 128
_QUANTISED_AT_ONCE = 1 << 22  # weights, so that temporary copies stay small


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a quantised model from the model that was stored."""

    divergence: float  # mean Kullback-Leibler divergence of the next token, in nats
    agreement: float  # share of tokens after which both find the same token most probable
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.2g} nats from the stored weights, same most probable "
            f"token after {self.agreement:.0%} of {self.num_tokens}"
        )


@torch.inference_mode()
def quantise_model(model: Any, tokenizer: Any) -> Distance | None:
    """Quantise all linears and the embedding that can be, in place; return the distance.

    Weights that a GGUF file stores in few bits stay as they are. If all of them do, then there is
    no distance. Raises ModelError if nothing is or can be in few bits, if a weight is too large, or
    if the model does not run.
    """
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        MOST_MAGNITUDE,
        PanelWriter,
        int8_parts,
    )

    names = quantisable(model)
    if not names and storage_of(model).by_format:
        return None
    if not names:
        raise ModelError(
            f"weights: int8 needs linears with a multiple of {INT8.group} inputs and "
            f"{PANEL} outputs or more, and {type(model).__name__} has none"
        )
    token_ids = text_ids_of(model, tokenizer)[:_MOST_TOKENS]
    before_TV = logits_of(model, token_ids)
    modules = holders(model)
    for name in names:
        weight_NK = modules[name].weight.detach()
        writer = PanelWriter(INT8, *weight_NK.shape)
        step = max(PANEL, _QUANTISED_AT_ONCE // weight_NK.shape[1] // PANEL * PANEL)
        for first in range(0, len(weight_NK), step):
            parts = int8_parts(weight_NK[first : first + step])
            if not np.isfinite(parts.factors_NB).all():
                raise ModelError(
                    f"weights: int8 needs weights of at most {MOST_MAGNITUDE:.0f} in magnitude, "
                    f"and {name} has a larger one"
                )
            writer.write(first, parts)
        del weight_NK
        hold(model, {name: writer.panels})
        modules.pop(name)
    return_freed_memory()
    return distance(before_TV, logits_of(model, token_ids))


def distance(before_TV: Tensor, after_TV: Tensor) -> Distance:
    """Return how far probabilities are from those before, over the tokens of a text."""
    before_TV, after_TV = (each.double().log_softmax(-1) for each in (before_TV, after_TV))
    divergence = (before_TV.exp() * (before_TV - after_TV)).sum(-1).mean()
    agreement = (before_TV.argmax(-1) == after_TV.argmax(-1)).double().mean()
    return Distance(float(divergence), float(agreement), len(before_TV))
