"""Load a GGUF file: its config, its weights in the served number type, and its tokenizer.

transformers' own GGUF loader is not used. It holds all weights in float32, needs accelerate, and
drops `rope.scaling.*`, `rope_freqs.weight` and each key that it does not know.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import Format
from ropewalk.model_runtime.formats.codes import Codes, stacked
from ropewalk.model_runtime.formats.gguf.gguf_architectures import config_of
from ropewalk.model_runtime.formats.gguf.gguf_blocks import Blocks
from ropewalk.model_runtime.formats.gguf.gguf_file import GgufFile, read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_sizes import num_parameters
from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import read_tokenizer
from ropewalk.model_runtime.formats.gguf.gguf_weights import Weights
from ropewalk.model_runtime.layers.experts.low_bit import ExpertMatrix
from ropewalk.model_runtime.loading.files.pretrained import fault_of
from ropewalk.model_runtime.loading.load_progress import logged_progress
from ropewalk.model_runtime.loading.low_bits.codes import blocks_as_codes
from ropewalk.model_runtime.loading.low_bits.hold import (
    IN_CODES,
    IN_PANELS,
    expert_holders,
    expert_matrices,
    hold,
    hold_experts,
    hold_reordered,
    holders,
)
from ropewalk.model_runtime.loading.low_bits.sizes import can_hold, format_of_type
from ropewalk.model_runtime.text.tokenizer import Tokenizer

_SECONDS_BETWEEN_LINES = 5.0

_log = structlog.get_logger(__name__)


def gguf_config(path: Path) -> Any:
    """Return the config of transformers that a file's metadata give. Raises ModelError."""
    values = config_of(read_gguf(path))
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # transformers validates it, and raises any type
        raise fault_of(path, error) from error


def load_gguf_model(
    path: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    keeps_bits: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Load the model in a number type. Raises ModelError.

    With `keeps_bits`, weights of linears and of the embedding stay in the bits of the file, if the
    kernels read their type: in panels, or as codes on the device if there is one. Beside the loaded
    weights, a piece of one tensor is held in float32.
    """
    file = read_gguf(path)
    if keeps_bits:
        _log.info("reading_gguf", file_bytes=file.num_bytes)
    else:
        _log.info(
            "dequantising_gguf",
            file_bytes=file.num_bytes,
            loaded_bytes=num_parameters(file) * dtype.itemsize,
            dtype=str(dtype).removeprefix("torch."),
        )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(each.shape) for name, each in empty.state_dict().items()}
    weights = weights_of(file, empty)
    panels = _low_bits(weights, empty, device) if keeps_bits else {}
    experts = _expert_low_bits(weights, empty, device) if keeps_bits else {}
    held = {*panels, *(f"{name}.{each}" for name, found in experts.items() for each in found)}
    # A view of one number stands for a weight in panels, and takes no memory.
    loaded = {name: torch.zeros(1, dtype=dtype).expand(shapes[name]) for name in held}
    told_s = time.monotonic()
    for name, tensor in weights.read(dtype, without=held):
        loaded[name] = tensor
        if time.monotonic() - told_s >= _SECONDS_BETWEEN_LINES:
            told_s = time.monotonic()
            _log.info("load_progress", what="Reading", done=len(loaded), total=len(shapes))
    with logged_progress():
        model, info = type(empty).from_pretrained(
            None, config=config, state_dict=loaded, dtype=dtype, output_loading_info=True
        )
    left = sorted(map(str, (*info["missing_keys"], *info["unexpected_keys"])))
    assert not left, left  # `Weights` has compared all names
    _hold(model, weights, panels, experts, in_codes=device is not None)
    return model


def weights_of(file: GgufFile, model: Any) -> Weights:
    """Return a file's weights by the names of a model, which needs none. Raises ModelError."""
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    return Weights(file, config_of(file), shapes)


def hold_stored(model: Any, weights: Weights, *, in_codes: bool = False) -> None:
    """Give a model without weights the panels or codes of a file, without numbers, in place."""
    device = torch.device("meta") if in_codes else None
    low_bits = _low_bits(weights, model, device, reads=False)
    experts = _expert_low_bits(weights, model, device, reads=False)
    _hold(model, weights, low_bits, experts, in_codes=in_codes)


def _hold(
    model: Any,
    weights: Weights,
    low_bits: Mapping[str, list[Any]],
    experts: Mapping[str, Mapping[str, Any]],
    *,
    in_codes: bool,
) -> None:
    """Give modules their panels or codes, and the order of the file, in place."""
    kinds = IN_CODES if in_codes else IN_PANELS
    orders = {name: weights.order_left(name, in_bits=name in low_bits) for name in holders(model)}
    changed = {name: order for name, order in orders.items() if not order.is_same}
    hold(model, {name: each[0] for name, each in low_bits.items() if name not in changed}, kinds)
    for name, order in changed.items():
        hold_reordered(model, name, low_bits.get(name, ()), order, kinds)
    for name, matrices in experts.items():
        hold_experts(model, name, matrices, kinds)


def _low_bits(
    weights: Weights, model: Any, device: torch.device | None, *, reads: bool = True
) -> dict[str, list[Any]]:
    """Return the panels of all weights that can stay in the bits of the file, by their tensors.

    With a device these are codes. Without `reads` they have no memory.
    """
    found = {}
    for name in holders(model):
        infos = weights.infos(name)
        kinds = [format_of_type(each.type_name) for each in infos]
        parts: list[Any] = []
        for part, (info, kind) in enumerate(zip(infos, kinds, strict=True)):
            if kind is None or not can_hold(name, info.shape, kind):
                break
            pieces = weights.blocks(name, part) if reads else None
            shape = info.num_rows, info.shape[-1]
            if device is None:
                parts.append(_in_panels(kind, shape, pieces))
            else:
                parts.append(blocks_as_codes(kind, shape, pieces, device))
        if parts and len(parts) == len(infos):
            found[name] = parts
    return found


def _in_panels(
    kind: Format, shape: tuple[int, int], pieces: Iterator[tuple[int, Blocks]] | None
) -> Any:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        NO_BYTES,
        PanelWriter,
        Parts,
    )

    writer = PanelWriter(kind, *shape, NO_BYTES if pieces is None else None)
    for first, blocks in pieces or ():
        writer.write(first, Parts(kind, *blocks))
    return writer.panels


def _expert_low_bits(
    weights: Weights, model: Any, device: torch.device | None, *, reads: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the matrices of all experts that can stay in the bits of the file, by their layer.

    With a device these are codes. Without `reads` they have no memory.
    """
    found = {}
    matrix = _expert_matrix if device is None else partial(_expert_codes, device=device)
    for name, module in expert_holders(model).items():
        names = expert_matrices(module)
        types = [weights.types_of(f"{name}.{each}") for each in names]
        is_held = all(format_of_type(each) for parts in types for each in parts)
        if is_held and not module.is_transposed:
            found[name] = {
                each: matrix(weights, f"{name}.{each}", module, reads=reads) for each in names
            }
    return found


def _expert_codes(
    weights: Weights, name: str, experts: Any, *, reads: bool, device: torch.device
) -> tuple[Codes, ...]:
    """Return a matrix of all experts as codes; gates and ups may be two parts."""
    num_experts, num_outputs, num_inputs = getattr(experts, name.rpartition(".")[2]).shape
    types = weights.types_of(name)
    parts = []
    for part, type_name in enumerate(types):
        kind = format_of_type(type_name)
        assert kind is not None
        shape = num_outputs // len(types), num_inputs
        of_experts = [
            blocks_as_codes(
                kind, shape, weights.expert_blocks(name, part, expert) if reads else None, device
            )
            for expert in range(num_experts)
        ]
        parts.append(stacked(of_experts))
    return tuple(parts)


def _expert_matrix(weights: Weights, name: str, experts: Any, *, reads: bool) -> ExpertMatrix:
    """Copy a matrix of all experts from the file into panels, a piece of one expert at a time."""
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        NO_BYTES,
        PanelWriter,
        Parts,
        panel_memory,
    )

    num_experts, num_outputs, num_inputs = getattr(experts, name.rpartition(".")[2]).shape
    types = weights.types_of(name)
    parts_PE = []
    for part, type_name in enumerate(types):
        kind = format_of_type(type_name)
        assert kind is not None
        shape = num_outputs // len(types), num_inputs
        size = kind.num_bytes(*shape)
        memory = panel_memory(num_experts * size) if reads else NO_BYTES
        writers = []
        for expert in range(num_experts):
            own = memory[expert * size : (expert + 1) * size]
            writers.append(PanelWriter(kind, *shape, memory=own))
            for first, blocks in weights.expert_blocks(name, part, expert) if reads else ():
                writers[-1].write(first, Parts(kind, *blocks))
        parts_PE.append([each.panels for each in writers])
    return ExpertMatrix(list(zip(*parts_PE, strict=True)))


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, frozenset[int]]:
    """Return the file's tokenizer, and the tokens that end an answer. Raises ModelError."""
    read = read_tokenizer(read_gguf(path))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=read.backend,
        chat_template=read.chat_templates or None,
        clean_up_tokenization_spaces=False,
        **read.special_tokens,
    )
    return Tokenizer(wrapped), read.end_ids
