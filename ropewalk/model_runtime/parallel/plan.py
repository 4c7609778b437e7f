"""The linears that are divided among ranks, from the plans of transformers.

transformers states for each architecture how its linears can be divided. Only the names are used,
not its modules: a plan says that a linear is cut along its outputs (`colwise`) or its inputs
(`rowwise`). Here every linear is cut along its outputs. A `rowwise` one therefore gathers its
inputs first, and its outputs afterwards.

Everything here happens before weights are read, on a model without memory.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.probing.probe import text_config

_COLUMNS, _ROWS, _GATHERED = "colwise", "rowwise", "colwise_gather_output"
_UNDIVIDED = {"replicated_with_grad_allreduce", "embedding_rowwise"}


@dataclass(frozen=True, slots=True)
class Part:
    """One linear that is divided."""

    gathers_input: bool
    gathers_output: bool
    has_heads: bool  # it makes or reads attention heads, which are divided whole


@dataclass(frozen=True, slots=True)
class Plan:
    """The divided linears of a model by name, and the weights that a rank holds."""

    size: int  # ranks
    parts: Mapping[str, Part]
    num_rank_parameters: int  # of one rank, with its part of a tied head


def plan_of(outline: ModelConfig, size: int) -> Plan:
    """Return the plan of a model over `size` ranks. Raises ModelError if it cannot be divided."""
    model, name = outline.empty, outline.architecture
    for problem in _problems(outline, model, size):
        raise ModelError(f"tensor_parallel_size {size}: {name} {problem}")
    parts = dict(_parts(model))
    return Plan(size, parts, _num_rank_parameters(model, parts, size))


def check_devices(size: int, named: str, device: Any) -> None:
    """Raise ModelError if a device is named that several ranks cannot share, or GPUs are short."""
    if device.type != "cuda":
        return
    if ":" in named:
        raise ModelError(
            f"device {named} is one GPU, tensor_parallel_size {size} needs {size}: use cuda"
        )
    found = torch.cuda.device_count()
    if found < size:
        raise ModelError(f"tensor_parallel_size is {size}, but torch finds {found} CUDA devices")


def _problems(outline: ModelConfig, model: Any, size: int) -> Iterator[str]:
    """Yield the reasons why a model cannot be divided."""
    if outline.states():
        yield "has layers that keep a state of each sequence, which is not divided among ranks yet"
    styles = _styles(model)
    if _ROWS not in styles.values():
        yield "has no plan in transformers that divides it"
    for pattern, style in styles.items():
        is_head = style == _GATHERED and "." not in pattern
        if not is_head and style not in {_COLUMNS, _ROWS, *_UNDIVIDED}:
            yield f"has a part that is divided in another way than by columns ({pattern}: {style})"
    yield from _attention_problems(model)
    config = text_config(model)
    yield from _head_problems(outline, config.num_attention_heads, size)
    if any(getattr(config, "activation_sparsity_pattern", None) or ()):
        yield "compares all values of a layer (activation_sparsity_pattern)"


def _attention_problems(model: nn.Module) -> Iterator[str]:
    parts = dict(_parts(model))
    for where, attention in _attentions(model):
        for name, child in attention.named_children():
            if isinstance(child, nn.Linear):
                if f"{where}.{name}" not in parts:
                    yield f"has an attention that its plan does not divide ({where}.{name})"
            elif any(each.dim() > 1 for each in child.parameters()):
                yield f"has weights for each head ({where}.{name})"


def _head_problems(outline: ModelConfig, num_heads: int, size: int) -> Iterator[str]:
    numbers = [("num_attention_heads", num_heads)]
    numbers += [("num_key_value_heads", each.num_key_heads) for each in outline.layers().values()]
    for field, number in numbers:
        if number % size:
            yield f"has {field} {number}, which is no multiple of {size}"


def _styles(model: Any) -> dict[str, str]:
    return dict(getattr(model, "tp_plan", None) or {})


def _parts(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield the linears that are divided, with their names."""
    styles = _styles(model)
    attentions = {where for where, _ in _attentions(model)}
    for name, module in model.named_modules():
        style = styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if type(module) is not nn.Linear or style in (None, *_UNDIVIDED):
            continue
        has_heads = name.rpartition(".")[0] in attentions
        yield name, Part(style == _ROWS, style != _COLUMNS, has_heads)


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attention modules, which know their layer and hold no other such module."""
    for name, module in model.named_modules():
        own = [each for each in module.modules() if hasattr(each, "layer_idx")]
        if len(own) == 1 and own[0] is module:
            yield name, module


def _num_rank_parameters(model: nn.Module, parts: Mapping[str, Part], size: int) -> int:
    """Return the number of weights that one rank holds."""
    linears = [model.get_submodule(name) for name in parts]
    cut = [each for linear in linears for each in linear.parameters()]
    # A head that shares the embedding's weight is a copy, because the embedding is not divided.
    looked_up = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    divided = {id(each) for each in cut} - {id(each) for each in looked_up}
    whole = sum(each.numel() for each in model.parameters() if id(each) not in divided)
    return whole + sum(-(-len(each) // size) * math.prod(each.shape[1:]) for each in cut)
