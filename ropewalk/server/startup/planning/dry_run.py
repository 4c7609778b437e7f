"""Read a model up to its weights and plan its serving: what `config check` prints.

`serve` reads it in the same way before it loads the weights.
"""

from dataclasses import replace
from typing import Any

import torch

from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory, machine_memory
from ropewalk.model_runtime.loading.checkpoint import rowless_ends, tokenizer_of
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.low_bits.sizes import Storage
from ropewalk.model_runtime.loading.model_config import (
    ModelConfig,
    read_model_config,
    torch_device,
)
from ropewalk.model_runtime.loading.notes import notes_of
from ropewalk.model_runtime.loading.phases import OnPhase, no_phases
from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.process.triton_needs import refuse_without_needs
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.gate import Problems
from ropewalk.server.startup.load_model import find_model
from ropewalk.server.startup.planning.banner_lines import Outlook, banner_lines
from ropewalk.server.startup.planning.model_facts import facts_ahead
from ropewalk.server.startup.planning.planned_deployments import plan_deployments
from ropewalk.server.startup.planning.serving_plan import ModelFacts, plan_layout, plan_serving
from ropewalk.server.startup.planning.template_of import Chat, chat_of


def outline_of(
    settings: ServeSettings, on_phase: OnPhase = no_phases, device: torch.device | None = None
) -> ModelConfig:
    """Read the settings' model, or the embedded one, up to its weights. Raises ModelError.

    The config and the tokenizer of a hub id are downloaded, and its weights are not. `device`: one
    that need not be here, in place of the settings'.
    """
    if device is None:
        device = torch_device(settings.device)
        refuse_without_needs(device)
    found = find_model(settings, weights=False, on_phase=on_phase)
    return read_model_config(
        found.folder,
        dtype=settings.dtype,
        device=device,
        trust_remote_code=settings.trust_remote_code,
        has_weights=found.has_weights,
    )


def refuse_ahead(settings: ServeSettings, on_phase: OnPhase = no_phases) -> None:
    """Raise ModelError or SettingsError for what can be known before weights are read."""
    _, facts = _read(settings, machine_memory(), on_phase)
    is_sized = settings.kv_cache_gib is not None or settings.kv_cache_tokens is not None
    if is_sized or facts.gpu_bytes is None:
        plan_serving(settings, facts)
    else:  # the size is measured on the GPU
        plan_layout(settings, facts)


def outlook_of(settings: ServeSettings, gpu_bytes: int | None = None) -> Outlook:
    """Read the model up to its weights, and plan. Raises ModelError or SettingsError.

    `gpu_bytes`: the memory of a GPU to plan for, which need not be here.
    Only loading shows whether the architecture can be taken over. Memory that other processes use
    may be free later, so it refuses nothing.
    """
    host = machine_memory()
    parts, facts = _read(settings, replace(host, free=host.total), gpu_bytes=gpu_bytes)
    return Outlook(plan_serving(settings, facts), *parts)


def _read(
    settings: ServeSettings,
    host: MachineMemory,
    on_phase: OnPhase = no_phases,
    gpu_bytes: int | None = None,
) -> tuple[tuple[Any, ...], ModelFacts]:
    """Return the parts of an outlook behind its plan, and the facts for the plan."""
    planned = None if gpu_bytes is None else torch.device("cuda")
    outline = outline_of(settings, on_phase, planned)
    chat, left_out = _checked(settings, outline)
    low_bits, rank_bytes = _storage(settings, outline, gpu_bytes)
    own_bytes = _own_bytes(outline, low_bits, rank_bytes)
    facts = facts_ahead(outline, settings, own_bytes, host, gpu_bytes)
    if gpu_bytes is not None and facts.affordable_bytes < facts.layout.page_bytes:
        share = settings.gpu_memory_utilization
        raise SettingsError(
            f"a GPU of {size_text(gpu_bytes)} has no room for a page of the KV cache beside "
            f"{size_text(own_bytes)} of weights (gpu_memory_utilization {share:g})"
        )
    return (outline, low_bits, rank_bytes, *chat, left_out), facts


def _checked(settings: ServeSettings, outline: ModelConfig) -> tuple[Chat, tuple[str, ...]]:
    """Return chat template and formats, and what is left out.

    Raises ModelError or SettingsError for a wrong tokenizer, template or deployment.
    """
    problems = Problems()
    vocab_size = outline.config.get_text_config().vocab_size

    def read() -> tuple[Chat, tuple[str, ...]]:
        tokenizer, end_ids = tokenizer_of(outline)
        notes = *notes_of(outline), *rowless_ends(end_ids, vocab_size).values()
        return chat_of(settings, tokenizer, vocab_size), notes

    found = problems.tried(read)
    problems.tried(lambda: plan_deployments(settings, outline.native()))
    problems.refuse()
    assert found is not None, "it was read without a problem"
    return found


def _storage(
    settings: ServeSettings, outline: ModelConfig, planned_bytes: int | None
) -> tuple[Storage | None, int | None]:
    """Return the storage of weights in few bits, and the bytes of one rank of several.

    Raises ModelError if the model cannot be stored, or divided, like that.
    """
    size = settings.tensor_parallel_size
    low_bits = planned_storage(outline, settings.weights, settings.activations, is_divided=size > 1)
    if size == 1:
        return low_bits, None
    from ropewalk.model_runtime.parallel.plan import check_devices, plan_of  # noqa: PLC0415  # rare

    if planned_bytes is None:
        check_devices(size, settings.device, outline.device)
    return low_bits, plan_of(outline, size).num_rank_parameters * outline.dtype.itemsize


def _own_bytes(outline: ModelConfig, low_bits: Storage | None, rank_bytes: int | None) -> int:
    """Return the bytes of weights in one process."""
    if rank_bytes is not None:
        return rank_bytes
    return outline.num_weight_bytes() if low_bits is None else low_bits.num_bytes


def outlook_lines(
    settings: ServeSettings, outlook: Outlook, gpu_bytes: int | None = None
) -> list[str]:
    """Return the banner of `serve`, with the memory that it would take.

    `gpu_bytes`: the memory of a GPU that was planned for.
    """
    outline, plan = outlook.outline, outlook.plan
    weights = f"{size_text(_own_bytes(outline, outlook.low_bits, None))} weights"
    if outlook.low_bits is not None:
        weights += f" in {outlook.low_bits.formats}"
    storage = outline.gguf_storage()
    if storage is not None:
        how = "dequantised from" if outlook.low_bits is None else "from"
        weights += f" ({how} {size_text(storage[0])} of GGUF, {storage[1]})"
    memory = f"{weights}, {size_text(plan.cache_bytes)} cache"
    if outline.device.type == "cpu":
        machine = machine_memory()
        memory += f", of {size_text(machine.total)} ({size_text(machine.free)} are free now)"
    elif gpu_bytes is not None:
        memory += f", of {size_text(gpu_bytes)} (planned: `serve` sizes the cache by a step)"
    elif settings.kv_cache_gib is None and settings.kv_cache_tokens is None:
        memory += " (estimated: `serve` runs a step of the model and sizes the cache by that)"
    return [
        *banner_lines(settings, outlook),
        f"  memory           {memory}",
        f"  would listen on  {settings.host}, port {settings.port}",
        "  not checked      whether the address is free, and whether the architecture can be taken "
        "over: loading it shows",
    ]
