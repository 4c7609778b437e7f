"""Plan the storage of weights in few bits: a load's own replacements, without a weight."""

from pathlib import Path
from typing import Any

import torch

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8, MXFP4, Format
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.codes import Cells, Codes
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.quantised_inventory import read_inventory
from ropewalk.model_runtime.formats.quantised_scheme import Group, Scheme
from ropewalk.model_runtime.layers.experts.low_bit import ExpertMatrix
from ropewalk.model_runtime.layers.experts.router_names import is_router
from ropewalk.model_runtime.loading.files.folder_files import weight_files
from ropewalk.model_runtime.loading.files.gguf_checkpoint import hold_stored, weights_of
from ropewalk.model_runtime.loading.low_bits.codes import StoredWeights
from ropewalk.model_runtime.loading.low_bits.hold import (
    IN_CODES,
    expert_holders,
    expert_matrices,
    hold,
    hold_experts,
    holders,
    storage_of,
)
from ropewalk.model_runtime.loading.low_bits.quantise import modules_for_int8
from ropewalk.model_runtime.loading.low_bits.sizes import (
    DIVIDED_STORED,
    NEEDS_FEW_BITS,
    NEEDS_FP8,
    Activations,
    Storage,
    Weights,
    is_kept,
    refuse_int8,
    refuse_rounding,
)
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.loading.text_part import empty_model
from ropewalk.model_runtime.runner.backends import has_cpu_kernels


def planned_storage(
    outline: ModelConfig,
    weights: Weights,
    activations: Activations = "exact",
    *,
    is_divided: bool,
) -> Storage | None:
    """Return the storage that a load would have; None if all weights are floats.

    Activations: `auto` is `int8` for weights that stay in the few bits of their files, on a
    processor that multiplies bytes, and else `exact`. benchmarks/results/quality.md has the reason.
    Raises ModelError if these weights or activations are not possible with this device, this number
    of processes or this checkpoint.
    """
    if weights == "int8":
        refuse_int8(outline.device.type, is_divided=is_divided)
    if activations not in {"auto", "exact"}:
        refuse_rounding(outline.device.type, activations, is_divided=is_divided)
    if is_divided:
        _refuse_divided(outline, weights)
    found = None if is_divided else _storage(outline, weights)
    has_few_bits = found is not None and bool(found.low_products or found.expert_bytes)
    is_fast = has_few_bits and weights == "stored" and _multiplies_bytes(outline.device)
    if found is not None and has_few_bits:
        found.is_rounding = activations == "int8" or (activations == "auto" and is_fast)
    elif activations == "int8" and outline.has_weights:
        raise ModelError(NEEDS_FEW_BITS)
    has_fp8 = found is not None and any("fp8" in each for each in found.by_format)
    if activations == "fp8" and outline.has_weights and not has_fp8:
        raise ModelError(NEEDS_FP8)
    return found


def _multiplies_bytes(device: torch.device) -> bool:
    if not has_cpu_kernels(device):
        return False
    from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.integer_dot import (  # noqa: PLC0415  # imports numba
        MULTIPLIES_BYTES,
    )

    return MULTIPLIES_BYTES


def _refuse_divided(outline: ModelConfig, weights: Weights) -> None:
    if weights == "stored" and outline.device.type != "cpu" and _in_codes(outline):
        raise ModelError(DIVIDED_STORED)


def _storage(outline: ModelConfig, weights: Weights) -> Storage | None:
    if weights == "dequantised":
        return None
    if not has_cpu_kernels(outline.device):
        return _in_codes(outline) if weights == "stored" else None
    path = Path(outline.source)
    if weights == "stored" and not path.is_file() and not is_kept(outline.stored):
        return None
    model = empty_model(outline.config, trust_remote_code=outline.trust_remote_code)
    model.to(outline.dtype)
    if path.is_file():
        hold_stored(model, weights_of(read_gguf(path), model))
    if is_kept(outline.stored):
        for name, experts in expert_holders(model).items():
            hold_experts(model, name, _matrices(experts, MXFP4))
    if weights == "int8":
        names, in_experts = modules_for_int8(model)
        modules = holders(model)
        for name in names:
            hold(model, {name: _panels(INT8, *modules[name].weight.shape)})
        for name in in_experts:
            hold_experts(model, name, _matrices(model.get_submodule(name), INT8))
    found = storage_of(model)
    return found if found.by_format else None


def _in_codes(outline: ModelConfig) -> Storage | None:
    """Return the storage of weights as codes."""
    path = Path(outline.source)
    if not path.is_file() and outline.stored is None:
        return None
    model = empty_model(outline.config, trust_remote_code=outline.trust_remote_code)
    model.to(outline.dtype)
    if path.is_file():
        hold_stored(model, weights_of(read_gguf(path), model), in_codes=True)
    elif outline.stored is not None:
        if outline.has_weights:
            inventory = read_inventory(weight_files(path), outline.stored)
            linears, experts = StoredWeights(model, inventory).read(None, torch.device("meta"))
        else:
            linears, experts = _stated(model, outline.stored)
        hold(model, linears, IN_CODES)
        for name, matrices in experts.items():
            hold_experts(model, name, matrices, IN_CODES)
    found = storage_of(model)
    return found if found.by_format else None


def _stated(
    model: Any, scheme: Scheme
) -> tuple[dict[str, Codes], dict[str, dict[str, tuple[Codes, ...]]]]:
    """Return the codes that a scheme promises, without files: about those that a load finds."""
    outside = model.get_input_embeddings(), model.get_output_embeddings()
    linears: dict[str, Codes] = {}
    experts: dict[str, dict[str, tuple[Codes, ...]]] = {}
    for name, module in holders(model).items():
        group = scheme.group_of(name.removesuffix(".weight"))
        is_held = module not in outside and not is_router(name.removesuffix(".weight"))
        if is_held and group is not None and scheme.method != "mxfp4":
            linears[name] = _stated_codes(group, tuple(module.weight.shape))
    for name, module in expert_holders(model).items():
        group = scheme.group_of(name)
        if group is not None:
            experts[name] = {
                each: (_stated_codes(group, tuple(getattr(module, each).shape)),)
                for each in expert_matrices(module)
            }
    return linears, experts


def _stated_codes(group: Group, shape: tuple[int, ...]) -> Codes:
    num_outputs, num_inputs = shape[-2:]
    cells = (*shape[:-2], *group.grids[0].shape(num_outputs, num_inputs))
    lower = torch.empty(*shape[:-1], num_inputs * group.bits // 8, dtype=torch.uint8, device="meta")
    scale = torch.empty(cells, dtype=torch.float16, device="meta")
    grid = group.grids[0]
    found = Cells(scale, grid.rows, grid.columns)
    return Codes(str(group), group.bits, num_outputs, num_inputs, lower, (found,))


def _panels(kind: Format, num_outputs: int, num_inputs: int) -> Any:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        NO_BYTES,
        LowBitPanels,
    )

    return LowBitPanels(kind, num_outputs, num_inputs, NO_BYTES)


def _matrices(experts: Any, kind: Format) -> dict[str, ExpertMatrix]:
    """Return the matrices of a layer's experts; gates and ups have panels of their own in int8."""
    first, second = expert_matrices(experts)
    is_split = kind is INT8 and experts.has_gate and experts.is_concatenated
    found = {}
    for name, count in ((first, 2 if is_split else 1), (second, 1)):
        num_experts, num_outputs, num_inputs = getattr(experts, name).shape
        if experts.is_transposed:
            num_outputs, num_inputs = num_inputs, num_outputs
        parts = (_panels(kind, num_outputs // count, num_inputs),) * count
        found[name] = ExpertMatrix([parts] * num_experts)
    return found
