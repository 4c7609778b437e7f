"""The memory that a model and a context take, as `inspect` reports it."""

from dataclasses import dataclass, replace

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.quantised.page_format import EXACT, most_staged
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import MXFP4
from ropewalk.model_runtime.loading.low_bits.active import Active, active_lines, active_part
from ropewalk.model_runtime.loading.low_bits.sizes import Storage
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.size_text import size_text


@dataclass(frozen=True, slots=True)
class Costs:
    """The memory that a context takes."""

    kv_bytes_per_token: int
    num_parameters: int
    parameter_bytes: int  # in the served dtype
    tied_head_bytes: int  # of the packed copy of a tied head
    file_bytes: int | None  # of a GGUF file; None: of other weights
    file_types: str | None  # the number types in it
    weight_bytes: int  # held once loaded: parameters, and the copy
    longest_context: int  # tokens, of any deployment
    memory_gib: float | None  # the size to report on
    memory_holds_tokens: int | None  # of cache, beside the weights
    longest_context_in_memory: int | None  # of one sequence
    stored_in: str | None = None  # of weights that are dequantised; None for any other checkpoint
    stored_bytes: int | None = None  # of their files
    low_bits: str | None = None  # formats of weights in few bits; None: all are floats
    active: Active | None = None  # the part that a token reads; None: all of it
    state_bytes: int = 0  # of one sequence, in layers that keep a state; 0: there are none
    kv_format: str = EXACT  # kv_cache_dtype
    kv_open_bytes: int = 0  # of one sequence's tail page; 0: no page is quantised
    kv_stage_bytes: int = 0  # of the pages that one prompt fills in a step; 0: no page is quantised
    kv_bytes_beyond_windows: int | None = None  # of a token; None: no layer holds its window only
    kv_windows: str | None = None  # which layers keep how many tokens
    kv_windows_not_held: str | None = None  # why layers with a window keep all tokens
    longest_context_bytes: int = 0  # of its pages


def costs_of(
    outline: ModelConfig,
    layout: CacheLayout,
    longest: int,
    memory_gib: float | None,
    low_bits: Storage | None = None,
    *,
    max_chunk: int,
) -> Costs:
    """Return the costs of a context of `longest` tokens, and what a stated memory holds.

    `low_bits`: the storage of weights in few bits, if a load would have it.
    `max_chunk`: tokens of a step.
    """
    page_size, kv_bytes, groups = layout.page_size, layout.token_bytes, layout.groups
    kv_stage_bytes = most_staged(max_chunk, 1, page_size) * layout.stage_bytes
    config = EngineConfig(
        kv_cache_tokens=0,
        max_model_len=longest,
        page_size=page_size,
        max_num_batched_tokens=max_chunk,
        page_groups=groups,
    )
    num_parameters, weight_bytes = outline.num_parameters(), outline.num_weight_bytes()
    if low_bits is not None:
        weight_bytes = low_bits.num_bytes
    file_bytes, file_types = outline.gguf_storage() or (None, None)
    holds = in_memory = None
    if memory_gib is not None:
        beside = layout.slot_bytes + layout.tail_bytes + kv_stage_bytes
        left = int(memory_gib * 2**30) - weight_bytes - beside
        holds = max(0, left // kv_bytes // page_size * page_size)
        in_memory = min(longest, replace(config, kv_cache_tokens=holds).longest_context)
    return Costs(
        kv_bytes,
        num_parameters,
        num_parameters * outline.dtype.itemsize,
        outline.num_tied_head_bytes() if low_bits is None else 0,
        file_bytes,
        file_types,
        weight_bytes,
        longest,
        memory_gib,
        holds,
        in_memory,
        None if outline.stored is None else str(outline.stored),
        outline.num_stored_bytes(),
        None if low_bits is None else low_bits.formats,
        active_part(outline, low_bits),
        layout.slot_bytes,
        layout.format,
        layout.tail_bytes,
        kv_stage_bytes,
        layout.bytes_beyond_windows if groups.has_windows else None,
        groups.text() if groups.has_windows else None,
        layout.why_whole,
        config.num_held_pages(longest) * layout.page_bytes,
    )


def too_small(costs: Costs, page_size: int) -> str | None:
    """Return the problem if the stated memory does not hold the weights and a page of the cache."""
    if costs.memory_holds_tokens != 0:
        return None
    page_bytes = page_size * costs.kv_bytes_per_token
    return (
        f"--memory-gib: must fit the weights ({size_text(costs.weight_bytes)}) and a page of the "
        f"cache ({page_size} tokens, {size_text(page_bytes)}), got {costs.memory_gib:g}"
    )


def cost_lines(costs: Costs, device_type: str) -> list[str]:
    """Return the lines about weights, the longest context and the stated memory."""
    longest = size_text(costs.longest_context_bytes + _beside(costs))
    lines = [
        *_weight_lines(costs),
        *_stored_lines(costs),
        *active_lines(costs.active, device_type),
        f"longest context  {costs.longest_context} tokens, {longest} of cache for one sequence",
    ]
    if costs.kv_open_bytes:
        size = size_text(costs.kv_open_bytes)
        lines.append(f"tail page        {size} of a sequence of any length, part of its cache")
        size = size_text(costs.kv_stage_bytes)
        lines.append(f"step             {size} of pages that a prompt fills, part of its cache")
    if costs.state_bytes:
        states = size_text(costs.state_bytes)
        lines.append(f"states           {states} of a sequence of any length, in float32")
    if costs.memory_gib is not None and not costs.memory_holds_tokens:
        lines.append(
            f"in {costs.memory_gib:g} GiB".ljust(17)
            + "0 tokens: the weights leave no room for a page of the cache"
        )
    elif costs.memory_gib is not None:
        limit = "the longest tier"
        if costs.longest_context_in_memory != costs.longest_context:
            limit = "what fits"
        lines.append(
            f"in {costs.memory_gib:g} GiB".ljust(17)
            + f"{costs.longest_context_in_memory} tokens ({limit}); room for "
            f"{costs.memory_holds_tokens} beside the weights"
        )
    return lines


def _beside(costs: Costs) -> int:
    """Return the bytes that a sequence of any length takes beside its pages."""
    return costs.state_bytes + costs.kv_open_bytes + costs.kv_stage_bytes


def _stored_lines(costs: Costs) -> list[str]:
    """Return the line about quantised weights; none for any other checkpoint."""
    if costs.stored_in is None:
        return []
    size = "" if costs.stored_bytes is None else f", {size_text(costs.stored_bytes)} in the files"
    is_kept = MXFP4.name in (costs.low_bits or "")
    then = "the experts keep their bits" if is_kept else "dequantised at load"
    return [f"stored in        {costs.stored_in}{size}; {then}"]


def _weight_lines(costs: Costs) -> list[str]:
    """Return the size of the parameters, and the memory that they take once loaded."""
    held = f"held in memory   {size_text(costs.weight_bytes)}"
    if costs.tied_head_bytes:
        copy = size_text(costs.tied_head_bytes)
        held += f": the parameters, and a packed copy of the tied head ({copy})"
    millions = f"{costs.num_parameters / 1e6:,.4g} million"
    lines = [f"parameters       {millions}, {size_text(costs.parameter_bytes)}", held]
    if costs.low_bits is not None:
        lines[-1] += f", in {costs.low_bits} and floats"
    if costs.file_bytes is not None:
        then = "dequantised when loaded" if costs.low_bits is None else "kept quantised"
        size = size_text(costs.file_bytes)
        lines.insert(1, f"GGUF file        {size} in {costs.file_types}, {then}")
    return lines
