"""Replace the linears and the embedding of a loaded model by modules with weights of few bits."""

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from model_runtime.layers.low_bits.modules import LowBitEmbedding, LowBitLinear
from model_runtime.loading.low_bits.sizes import Storage, can_quantise

if TYPE_CHECKING:
    from model_runtime.cpu_kernels.low_bits.panels import LowBitPanels


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
