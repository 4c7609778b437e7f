"""Replace the linears and the embedding of a loaded model by modules with weights of few bits."""

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8, PANEL
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_hybrids import Order
from ropewalk.model_runtime.layers.experts.low_bit import ExpertMatrix, LowBitExperts, is_experts
from ropewalk.model_runtime.layers.low_bits.modules import (
    LowBitEmbedding,
    LowBitLinear,
    ReorderedLinear,
)
from ropewalk.model_runtime.loading.low_bits.sizes import (
    Storage,
    can_quantise,
    can_quantise_experts,
)
from ropewalk.model_runtime.probing.untouched import logits_of, text_ids_of

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


def hold_reordered(model: Any, name: str, parts: Sequence["LowBitPanels"], order: Order) -> None:
    """Let a linear work in the order of a file, in place, with its panels if there are any.

    `name`: that of its weight.
    """
    where = name.removesuffix(".weight")
    module = model.get_submodule(where)
    linears = [LowBitLinear(each, None, module.weight.dtype) for each in parts] or [module]
    model.set_submodule(where, ReorderedLinear(linears, *order))


def expert_holders(model: Any) -> dict[str, Any]:
    """Return the modules with the experts of a layer whose weights may be stored in few bits."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_experts(module)
        and not isinstance(module, LowBitExperts)
        and not module.has_post_expert_norm
    }


def expert_matrices(experts: Any) -> tuple[str, str]:
    """Return the names of the parameters of the first and the second product."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def hold_experts(model: Any, name: str, matrices: Mapping[str, ExpertMatrix]) -> None:
    """Give the experts of a layer their panels, in place. Their floats are freed."""
    model.set_submodule(name, LowBitExperts(model.get_submodule(name), matrices))


def quantisable_experts(model: Any) -> list[str]:
    """Return the names of the modules with experts that can be quantised to int8."""
    found = []
    for name, each in expert_holders(model).items():
        between, width = each.down_proj.shape[-2:]
        if can_quantise_experts(width, between):
            found.append(name)
    return found


def quantisable(model: Any) -> list[str]:
    found = holders(model).items()
    return [name for name, each in found if can_quantise(name, tuple(each.weight.shape))]


def modules_for_int8(model: Any) -> tuple[list[str], list[str]]:
    """Return the weights and the modules with experts that are quantised to int8.

    Raises ModelError if no weight is or can be in few bits.
    """
    names, experts = quantisable(model), quantisable_experts(model)
    if not (names or experts or storage_of(model).by_format):
        raise ModelError(
            f"weights: int8 needs linears with a multiple of {INT8.group} inputs and "
            f"{PANEL} outputs or more, and {type(model).__name__} has none"
        )
    return names, experts


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
                found.add(f"{name}.weight", shape, panels.kind, is_product=is_product)
    for name, module in modules:
        if type(module) is nn.Linear:
            weight = module.weight
            found.add_widening(f"{name}.weight", tuple(weight.shape), weight.itemsize)
    # With buffers that files have, such as the biases of experts' scores.
    found.float_bytes = sum(each.nbytes for each in model.state_dict(keep_vars=True).values())
    for _, module in modules:
        if isinstance(module, LowBitExperts):
            found.float_bytes += sum(each.nbytes for each in module.biases())
            for matrix in module.matrices.values():
                for part in (part for parts in matrix.parts_E for part in parts):
                    found.add_experts((part.num_outputs, part.num_inputs), part.kind)
    return found


def return_freed_memory() -> None:
    """Return memory that was freed to the system, where the C library keeps it (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# Quantise a loaded model to int8, and measure how far its answers are from those before.
#
# Shapes: T = tokens of the text, V = vocabulary.

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels

_MOST_TOKENS = 128
_QUANTISED_AT_ONCE = 1 << 22  # weights, so that temporary copies stay small


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a model that rounds more from the model that rounds less."""

    divergence: float  # mean Kullback-Leibler divergence of the next token, in nats
    agreement: float  # share of tokens after which both find the same token most probable
    num_tokens: int
    origin: str = "the stored weights"

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.2g} nats from {self.origin}, same most probable "
            f"token after {self.agreement:.0%} of {self.num_tokens}"
        )


@torch.inference_mode()
def quantise_model(model: Any, tokenizer: Any) -> Distance | None:
    """Quantise all linears, experts and the embedding that can be, in place; return the distance.

    Weights that a GGUF file stores in few bits stay as they are. If all of them do, then there is
    no distance. Raises ModelError if nothing is or can be in few bits, if a weight is too large, or
    if the model does not run.
    """
    names, experts = modules_for_int8(model)
    if not (names or experts):
        return None
    token_ids = text_ids_of(model, tokenizer)[:_MOST_TOKENS]
    before_TV = logits_of(model, token_ids)
    modules = holders(model)
    for name in names:
        hold(model, {name: _int8_panels(name, modules[name].weight.detach())})
        modules.pop(name)
    for name in experts:
        hold_experts(model, name, _int8_matrices(name, model.get_submodule(name)))
        return_freed_memory()
    return_freed_memory()
    return distance(before_TV, logits_of(model, token_ids))


def _int8_panels(name: str, weight_NK: Tensor) -> "LowBitPanels":
    """Return a weight in panels. Raises ModelError if a number is too large."""
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        MOST_MAGNITUDE,
        PanelWriter,
        int8_parts,
    )

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
    return writer.panels


def _int8_matrices(where: str, experts: Any) -> dict[str, ExpertMatrix]:
    """Return the matrices of a layer's experts in panels, quantised one expert at a time."""
    first, second = expert_matrices(experts)
    num_parts = 2 if experts.has_gate and experts.is_concatenated else 1
    found = {}
    for name, count in ((first, num_parts), (second, 1)):
        parts_E = []
        for weight in getattr(experts, name).detach():
            rows_NK = weight.t().contiguous() if experts.is_transposed else weight
            parts = rows_NK.chunk(count)
            parts_E.append(tuple(_int8_panels(f"{where}.{name}", each) for each in parts))
        found[name] = ExpertMatrix(parts_E)
    return found


def distance(before_TV: Tensor, after_TV: Tensor) -> Distance:
    """Return how far probabilities are from those before, over the tokens of a text."""
    before_TV, after_TV = (each.double().log_softmax(-1) for each in (before_TV, after_TV))
    divergence = (before_TV.exp() * (before_TV - after_TV)).sum(-1).mean()
    agreement = (before_TV.argmax(-1) == after_TV.argmax(-1)).double().mean()
    return Distance(float(divergence), float(agreement), len(before_TV))
