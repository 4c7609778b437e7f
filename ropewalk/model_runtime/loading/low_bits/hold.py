"""Replace the linears and the embedding of a loaded model by modules with weights of few bits."""

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from ropewalk.model_runtime.formats.gguf.gguf_hybrids import Order
from ropewalk.model_runtime.layers.experts.low_bit import LowBitExperts, is_experts
from ropewalk.model_runtime.layers.low_bits.modules import (
    LowBitEmbedding,
    LowBitLinear,
    ReorderedLinear,
)
from ropewalk.model_runtime.layers.low_bits.stored import (
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
)
from ropewalk.model_runtime.loading.low_bits.sizes import Storage


class Modules(NamedTuple):
    """The classes that hold weights of few bits in one layout."""

    linear: Any
    embedding: Any
    experts: Any


IN_PANELS = Modules(LowBitLinear, LowBitEmbedding, LowBitExperts)  # on a CPU
IN_CODES = Modules(StoredLinear, StoredEmbedding, StoredExperts)  # on any device
_ALL_EXPERTS = IN_PANELS.experts, IN_CODES.experts


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


def hold(model: Any, weights: Mapping[str, Any], kinds: Modules = IN_PANELS) -> None:
    """Give modules their panels or codes, by the name of the weight, in place.

    Their floats are freed.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and type(head) is nn.Linear and head.weight is embedding.weight
    for name, each in weights.items():
        where = name.removesuffix(".weight")
        module = model.get_submodule(where)
        dtype = module.weight.dtype
        if module is not embedding:
            model.set_submodule(where, kinds.linear(each, module.bias, dtype))
            continue
        model.set_submodule(where, kinds.embedding(each, module))
        if is_tied:
            model.set_output_embeddings(kinds.linear(each, head.bias, dtype))


def hold_reordered(
    model: Any, name: str, parts: Sequence[Any], order: Order, kinds: Modules = IN_PANELS
) -> None:
    """Let a linear work in the order of a file, in place, with its panels or codes, if any.

    `name`: that of its weight.
    """
    where = name.removesuffix(".weight")
    module = model.get_submodule(where)
    linears = [kinds.linear(each, None, module.weight.dtype) for each in parts] or [module]
    model.set_submodule(where, ReorderedLinear(linears, *order))


def expert_holders(model: Any) -> dict[str, Any]:
    """Return the modules with the experts of a layer whose weights may be stored in few bits."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_experts(module)
        and not isinstance(module, _ALL_EXPERTS)
        and not module.has_post_expert_norm
    }


def expert_matrices(experts: Any) -> tuple[str, str]:
    """Return the names of the parameters of the first and the second product."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def hold_experts(
    model: Any, name: str, matrices: Mapping[str, Any], kinds: Modules = IN_PANELS
) -> None:
    """Give the experts of a layer their panels or codes, in place. Their floats are freed."""
    model.set_submodule(name, kinds.experts(model.get_submodule(name), matrices))


def storage_of(model: Any) -> Storage:
    """Return the storage of a model whose modules have panels or codes, before it is packed."""
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
                found.add(f"{name}.weight", shape, panels.kind, is_product=is_product)
    _add_codes(found, model)
    for name, module in modules:
        if type(module) is nn.Linear:
            weight = module.weight
            found.add_widening(f"{name}.weight", tuple(weight.shape), weight.itemsize)
    # With buffers that files have, such as the biases of experts' scores.
    found.float_bytes = _float_bytes(model, counts_once=found.in_codes)
    for _, module in modules:
        if isinstance(module, LowBitExperts):
            found.float_bytes += sum(each.nbytes for each in module.biases())
            for matrix in module.matrices.values():
                for part in (part for parts in matrix.parts_E for part in parts):
                    found.add_experts((part.num_outputs, part.num_inputs), part.kind)
    return found


def _float_bytes(model: Any, *, counts_once: bool) -> int:
    """Return the bytes of all floats; a CPU packs a copy of a tied head, so it counts twice."""
    held = model.state_dict(keep_vars=True).items()
    sizes = {id(each) if counts_once else name: each.nbytes for name, each in held}
    return sum(sizes.values())


def _add_codes(found: Storage, model: Any) -> None:
    """Count the weights that modules hold as codes."""
    seen = set()
    for module in model.modules():
        codes: list[Any] = []
        if isinstance(module, StoredLinear | StoredEmbedding):
            codes = [module.codes]
        elif isinstance(module, StoredExperts):
            codes = [each for parts in module.matrices.values() for each in parts]
            found.expert_bytes += sum(each.num_bytes for each in codes)
        for each in codes:
            if id(each) not in seen:
                seen.add(id(each))
                found.in_codes = True
                found.by_format[each.name] = found.by_format.get(each.name, 0) + each.num_bytes


def return_freed_memory() -> None:
    """Return memory that was freed to the system, where the C library keeps it (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
