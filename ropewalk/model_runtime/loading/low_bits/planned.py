"""The storage of weights in few bits, from the files' headers: no weight is read."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8, MXFP4, Format
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.low_bits.sizes import (
    NEEDS_FEW_BITS,
    Activations,
    Storage,
    Weights,
    can_hold,
    can_quantise,
    can_quantise_experts,
    format_of_type,
    is_kept,
    refuse_int8,
    refuse_rounding,
)
from ropewalk.model_runtime.loading.model_config import ModelConfig

if TYPE_CHECKING:
    from ropewalk.model_runtime.formats.gguf.gguf_file import TensorInfo

_GGUF_EMBEDDING, _GGUF_HEAD, _GGUF_ROUTER = "token_embd.weight", "output.weight", "gate_inp"
_GGUF_EXPERTS = re.compile(r"\.ffn_(gate|up|down)_exps\.weight$")
# A matrix of one expert, or of all experts of a layer; gates and ups may be one tensor.
_EXPERTS = re.compile(
    r"\.experts\.(\d+\.\w+\.weight|(gate_up|up|down)_proj|fc[12]\.weight)$"
    r"|\.block_sparse_moe\.(input|output)_linear\.weight$"
)
_GATE_UP = re.compile(r"\.(gate_up_proj|fc1\.weight|input_linear\.weight)$")
_HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"\b(embed_tokens|embed_in|wte|word_embeddings)\b")


def planned_storage(
    outline: ModelConfig,
    weights: Weights,
    activations: Activations = "exact",
    *,
    is_divided: bool,
) -> Storage | None:
    """Return the storage that a load would have; None if all weights are floats, or not here.

    Raises ModelError if int8 weights or activations are not possible with this device, this number
    of processes or these weights.
    """
    if activations == "exact":
        return _storage(outline, weights, is_divided=is_divided)
    refuse_rounding(outline.device.type, is_divided=is_divided)
    found = _storage(outline, weights, is_divided=is_divided)
    if found is not None and (found.low_products or found.expert_bytes):
        found.is_rounding = True
    elif outline.has_weights or Path(outline.source).is_file():
        raise ModelError(NEEDS_FEW_BITS)
    return found


def _storage(outline: ModelConfig, weights: Weights, *, is_divided: bool) -> Storage | None:
    """Return the storage without a look at activations."""
    if weights == "int8":
        refuse_int8(outline.device.type, is_divided=is_divided)
    if outline.device.type != "cpu" or is_divided or weights == "dequantised":
        return None
    path = Path(outline.source)
    if path.is_file():
        found = _gguf(outline, path, to_int8=weights == "int8")
    elif outline.has_weights and (weights == "int8" or is_kept(outline.stored)):
        found, is_tied = Storage(), outline.is_tied
        width = outline.config.get_text_config().hidden_size
        for name, shape in _shapes(outline):
            is_expert = _EXPERTS.search(name) is not None and len(shape) > 1
            if is_expert and (weights == "int8" or is_kept(outline.stored)):
                matrices = _expert_matrices(name, shape, width)
                if is_kept(outline.stored) or can_quantise_experts(*matrices[0][-2:]):
                    for each in matrices:
                        found.add_experts(each, MXFP4 if is_kept(outline.stored) else INT8)
                    continue
            kind = INT8 if weights == "int8" and can_quantise(name, shape) else None
            is_product = is_tied or not _EMBEDDING.search(name)
            found.add(name, shape, kind, outline.dtype.itemsize, is_product=is_product)
    else:
        return None
    return found if found.by_format else None


def _expert_matrices(name: str, shape: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Return the shapes of the products in a tensor of experts, outputs before inputs.

    Gates and ups have panels of their own, unless they alternate, as they do where the inputs come
    first (gpt-oss). `width`: the numbers of a row between layers.
    """
    *experts, num_outputs, num_inputs = shape
    is_gate_up = _GATE_UP.search(name) is not None
    has_inputs_first = num_inputs != width if is_gate_up else num_outputs != width
    if has_inputs_first and len(experts) == 1:
        num_outputs, num_inputs = num_inputs, num_outputs
    alternates = has_inputs_first and name.endswith("gate_up_proj")
    if is_gate_up and not alternates:
        return [(*experts, num_outputs // 2, num_inputs)] * 2
    return [(*experts, num_outputs, num_inputs)]


def _gguf(outline: ModelConfig, path: Path, *, to_int8: bool) -> Storage:
    from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415  # imports numpy
    from ropewalk.model_runtime.formats.gguf.gguf_sizes import served_tensors  # noqa: PLC0415

    found, tensors = Storage(), served_tensors(read_gguf(path))
    for name, info in tensors.items():
        if _GGUF_EXPERTS.search(name) and len(info.shape) == 3:
            kind = _expert_format(tensors, name, to_int8=to_int8)
            if kind is not None:
                found.add_experts(info.shape, kind)
                continue
        kind = format_of_type(info.type_name)
        if _GGUF_ROUTER in name or kind is None or not can_hold(name, info.shape, kind):
            is_int8 = to_int8 and _GGUF_ROUTER not in name and can_quantise(name, info.shape)
            kind = INT8 if is_int8 else None
        is_head = _GGUF_HEAD not in tensors
        is_product = is_head or name != _GGUF_EMBEDDING
        found.add(name, info.shape, kind, outline.dtype.itemsize, is_product=is_product)
        if name == _GGUF_EMBEDDING and kind is None and is_head:
            found.add(name, info.shape, None, outline.dtype.itemsize)  # the head's packed copy
    return found


def header_shapes(outline: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the weights in a checkpoint's files."""
    path = Path(outline.source)
    if path.is_file():
        from ropewalk.model_runtime.formats.gguf.gguf_file import (  # noqa: PLC0415  # imports numpy
            read_gguf,
        )
        from ropewalk.model_runtime.formats.gguf.gguf_sizes import served_tensors  # noqa: PLC0415

        found = served_tensors(read_gguf(path))
        yield from ((name, tuple(each.shape)) for name, each in found.items())
    else:
        yield from _shapes(outline)


def _expert_format(
    tensors: Mapping[str, "TensorInfo"], name: str, *, to_int8: bool
) -> Format | None:
    """Return the format of a matrix of experts; None if those of its layer become floats."""
    layer, _, _ = name.rpartition(".ffn_")
    beside = [
        each
        for found, each in tensors.items()
        if found.startswith(f"{layer}.ffn_") and _GGUF_EXPERTS.search(found)
    ]
    if all(format_of_type(each.type_name) for each in beside):
        return format_of_type(tensors[name].type_name)
    is_int8 = to_int8 and can_quantise_experts(*tensors[name].shape[-2:])
    return INT8 if is_int8 else None


def _shapes(outline: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a checkpoint's weights; a tied head counts once."""
    is_tied = outline.is_tied
    for name, shape in outline.weight_shapes():
        if not (is_tied and name == _HEAD):
            yield name, shape
