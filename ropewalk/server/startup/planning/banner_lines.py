"""Write the banner of `serve`; `config check` prints the same before weights are loaded.

A setting at its default has no line.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ropewalk.model_runtime.attention.quantised.page_format import FIXED8, ROUNDED
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.low_bits.active import active_lines, active_part
from ropewalk.model_runtime.loading.low_bits.sizes import Storage
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.loading.pack_model import exact_products, expected_products
from ropewalk.model_runtime.runner.backends import described, long_prompt_tokens
from ropewalk.model_runtime.size_text import size_text
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.tools.find_format import ChatFormats
from ropewalk.rope import ROPE_TYPES
from ropewalk.server.playground.page_files import has_playground
from ropewalk.server.process.torch_build import TorchBuild, has_nvidia_gpu, mismatch
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.request_sections import LimitSettings
from ropewalk.server.startup.planning.serving_plan import ServingPlan, memory_text, part_bytes
from ropewalk.server.wording import counted

if TYPE_CHECKING:
    from ropewalk.model_runtime.parallel.ranks import Ranks

# Beside the section of limits: what fills the request queue, and what a chat may set.
_NAMES = (
    *("max_queued_requests", "max_queued_prompt_tokens"),
    *LimitSettings.model_fields,
    "allowed_chat_template_kwargs",
)

_MEASURED = "a load measures how far that moves answers"
_LARGE_SHARE = 0.25  # of a cache, for tail pages; an operator should know


@dataclass(frozen=True, slots=True)
class Outlook:
    """A model and how it is served: planned from its config, or loaded."""

    plan: ServingPlan
    outline: ModelConfig
    low_bits: Storage | None  # of quantised weights; None: all are floats
    rank_weight_bytes: int | None  # of one process of several; None: there is one
    template: ChatTemplate
    formats: ChatFormats
    left_out: tuple[str, ...]  # a sentence for each value of its files that is not used


def banner_lines(
    settings: ServeSettings,
    outlook: Outlook,
    loaded: Checkpoint | None = None,
    ranks: "Ranks | None" = None,
) -> list[str]:
    """Return the facts that an operator needs before the first request.

    `loaded` adds what only a load finds, and `ranks` what several processes find.
    """
    outline, device = outlook.outline, outlook.outline.device
    has_same_bits = None if loaded is None else loaded.report.bitwise
    is_on_gpu = device.type == "cuda"
    if is_on_gpu and not settings.exact_batches:
        has_same_bits = False
    if loaded is not None:
        products = loaded.products
    else:
        products, numbers = expected_products(device, outline.dtype)
        if outlook.low_bits is not None:
            products = outlook.low_bits.products(numbers)
        if is_on_gpu and settings.exact_batches:
            products = exact_products(has_few_bits=outlook.low_bits is not None)
    active = active_part(outline, outlook.low_bits)
    return [
        f"  model            {outline.architecture}, {device}, {_name(outline.dtype)}"
        f"{_threads(settings, outline.device, loaded)}",
        *_weight_lines(settings, outlook, loaded),
        *(f"  {each}" for each in active_lines(active, device.type)),
        *_rank_lines(settings, outlook, ranks),
        *_torch_lines(),
        *describe(outlook.plan),
        *_step_lines(settings, outlook.plan.config, is_on_gpu=is_on_gpu),
        *limit_lines(settings),
        *_chat_lines(settings, outlook.formats),
        *(
            f"  warning          {each}"
            for each in (outlook.template.plain_problem, *outlook.left_out)
            if each is not None
        ),
        f"  kernels          {products}; attention {_attention(settings, device)}",
        *draft_lines(settings.max_draft_tokens, is_exact=has_same_bits),
        self_check_line(is_loaded=loaded is not None, has_same_bits=has_same_bits),
    ]


def describe(plan: ServingPlan) -> list[str]:
    """Return the lines that an operator should read before the first request."""
    lines = []
    for deployment in plan.deployments:
        limited = ""
        if deployment.is_cache_limited:
            limited = " (the size of the KV cache)"
        elif deployment.max_len < deployment.own_tiers[-1].ceiling:
            limited = " (max_model_len)"
        method = deployment.position_method
        lines += [
            f"  deployment       {deployment.name}",
            f"    native length  {deployment.native_len} tokens",
            f"    scaling        {deployment.rope_type}, {deployment.policy}",
            *([f"    positions      {method}"] if method is not None else []),
            f"    tiers          {_tiers(deployment)}",
            f"    longest        {deployment.max_len} tokens{limited}",
            *_shortened(deployment),
            *_bounded(deployment),
        ]
        if deployment.note is not None:
            lines.append(f"    warning        {deployment.note}")
    pages = f"{plan.config.num_pages} pages of {plan.config.page_size}"
    size = size_text(plan.cache_parts["pages"])
    lines.append(f"  KV cache         {plan.capacity} tokens, {size} in {pages}")
    lines += _window_lines(plan)
    lines += _format_lines(plan)
    if plan.config.kv_offload_gib is not None:
        size = f"{plan.config.kv_offload_gib:g} GiB, {size_text(plan.layout.token_bytes)} a token"
        lines.append(f"    in host memory {size}")
    if plan.config.kv_disk is not None:
        size = f"{plan.config.kv_disk_gib:g} GiB in {plan.config.kv_disk}"
        lines.append(f"    on disk        {size}, {size_text(plan.layout.token_bytes)} a token")
    if plan.config.kv_store is not None:
        place = _store_place(plan.config.kv_store)
        lines.append(f"    in a store     {place}, {size_text(plan.layout.token_bytes)} a token")
    states_bytes = part_bytes(plan.layout, plan.config)["states"]
    if states_bytes:
        slots = f"{plan.config.num_state_slots} slots of {size_text(plan.layout.slot_bytes)}"
        others = "snapshots of prefixes" + (", and drafts" * (plan.config.max_draft_tokens != 0))
        lines.append(
            f"  states           {size_text(states_bytes)} in {slots}; at most "
            f"{plan.config.max_num_seqs} sequences run, the other slots are for {others}"
        )
    if plan.memory is not None:
        lines.append(f"    beside it      {memory_text(plan.memory)}")
    return lines


def _tiers(deployment: Deployment) -> str:
    """Return the tiers; those that no context is long enough for stand apart."""
    reached: list[str] = []
    beyond: list[str] = []
    floor = 0  # of a tier's contexts
    for tier in deployment.own_tiers:
        part = beyond if floor >= deployment.max_len else reached
        part.append(f"{tier.ceiling}:{tier.label}")
        floor = tier.ceiling
    text = " ".join(reached)
    return f"{text}; beyond the longest context: {' '.join(beyond)}" if beyond else text


def _shortened(deployment: Deployment) -> list[str]:
    """Return a line if the cache is smaller than the longest tier, or none."""
    longest = deployment.own_tiers[-1].ceiling
    if not deployment.is_cache_limited:
        return []
    return [
        f"    warning        the KV cache has {deployment.max_len} tokens, and the longest tier "
        f"{longest}; raise kv_cache_gib or kv_cache_tokens, or quantise the cache (kv_cache_dtype)"
    ]


def _window_lines(plan: ServingPlan) -> list[str]:
    """Return the line about sliding-window layers; none if no layer has a window that matters."""
    layout, config = plan.layout, plan.config
    if layout.why_whole is not None:
        return [f"    windows        no sliding-window cache: {layout.why_whole}"]
    if not layout.groups.has_windows:
        return []
    longest = min(config.max_model_len, config.longest_context)
    size = config.num_held_pages(longest) * layout.page_bytes
    return [
        f"    windows        {layout.groups.text()}; {layout.token_bytes} bytes a token, "
        f"{layout.bytes_beyond_windows} beyond the windows; a context of {longest} tokens "
        f"takes {size_text(size)} at most"
    ]


def _store_place(address: str) -> str:
    """Return the address of a store without its password."""
    from ropewalk.model_runtime.engine.kv_disk.stores.store_url import (  # noqa: PLC0415  # rare
        parse_store_url,
    )

    return parse_store_url(address).shown


def _format_lines(plan: ServingPlan) -> list[str]:
    """Return the lines about the numbers of pages; none if they are those of the model."""
    layout, num_seqs = plan.layout, plan.config.max_num_seqs
    if layout.format == ROUNDED:
        text = f"{ROUNDED}, the numbers of the model: the same as auto"
        if layout.rounds:
            text = (
                f"{ROUNDED}, {layout.token_bytes} bytes a token (auto: {2 * layout.token_bytes}); "
                "keys and values are rounded when they are written"
            )
        return [f"    format         {text}"]
    if layout.format == FIXED8:
        return [
            f"    format         {FIXED8}, {layout.token_bytes} bytes a token (auto: "
            f"{layout.exact_bytes}); scales are those of the self-check's text"
        ]
    if not layout.quantises:
        return []
    parts = part_bytes(layout, plan.config)
    lines = [
        f"    format         {layout.format}, {layout.token_bytes} bytes a token (auto: "
        f"{layout.exact_bytes}); {size_text(parts['open'])} of tail pages for {num_seqs} "
        f"sequences, {size_text(parts['stage'])} of pages that a step fills"
    ]
    share = parts["open"] / (plan.cache_bytes - parts["states"])
    if share > _LARGE_SHARE:
        lines.append(
            f"    tail pages     take {share:.0%} of the cache: a lower max_num_seqs than "
            f"{num_seqs} leaves room for more tokens"
        )
    return lines


def _bounded(deployment: Deployment) -> list[str]:
    """Return what the `rope` object of a request may name, or none if that is every table."""
    methods = ", ".join(deployment.rope_types)
    if deployment.position_methods:
        methods += f" and positions {', '.join(deployment.position_methods)}"
    if deployment.serves_default_within_native:
        methods += f", default (up to {deployment.native_len} tokens)"
    policies = "any policy" if deployment.overridable else f"policy {deployment.policy} only"
    highest = deployment.method_tiers[-1].factor
    factors = f"factors up to {deployment.max_rope_factor:g}; "
    if (
        deployment.overridable
        and not deployment.position_methods
        and set(ROPE_TYPES) - {"longrope"} <= set(deployment.rope_types)
        and deployment.max_rope_factor == highest
    ):
        return []
    shown = factors if deployment.max_rope_factor > 1 else ""
    return [f"    requests       may name {methods}; {shown}{policies}"]


def self_check_line(*, is_loaded: bool, has_same_bits: bool | None) -> str:
    """Return the line about the self-check and batch invariance; None: a load finds it."""
    state = "passed" if is_loaded else "not run"
    if has_same_bits is None:
        return f"  self-check       {state}; batch invariance is found at load"
    exact = "to the bit" if has_same_bits else "within rounding"
    return f"  self-check       {state}; batch invariance {exact}"


def draft_lines(stated: int | None, *, is_exact: bool | None) -> list[str]:
    """Return the line about drafts; none by default.

    `stated`: max_draft_tokens. `is_exact`: whether no bit depends on a draft; None: a load finds.
    """
    if stated is None:
        return []
    if not stated:
        text = "off (max_draft_tokens 0)"
    elif is_exact is None:
        text = f"up to {stated} tokens"
    elif is_exact:
        text = f"up to {stated} tokens; no bit of an answer depends on them"
    else:
        text = f"up to {stated} tokens; bits may depend on the draft"
    return [f"  drafts           {text}"]


def _step_lines(settings: ServeSettings, config: EngineConfig, *, is_on_gpu: bool) -> list[str]:
    """Return how large a step is, and how long one with prompts; none for a CPU's defaults."""
    stated = settings.max_num_seqs, settings.max_num_batched_tokens, settings.step_target_seconds
    if not is_on_gpu and stated == (None, None, None):
        return []
    return [step_line(config)]


def step_line(config: EngineConfig) -> str:
    """Return the line about the limits of a step."""
    target = config.step_target_s
    return (
        f"  steps            up to {config.max_num_seqs} sequences (max_num_seqs) and "
        f"{config.max_num_batched_tokens} tokens (max_num_batched_tokens)"
        + ("" if target is None else f", {target:g} s while others decode")
    )


def limit_lines(settings: ServeSettings) -> list[str]:
    """Return who is answered, and what is logged, served and limited otherwise than by default."""
    changed = [
        f"{name} {_text(getattr(settings, name))}"
        for name in _NAMES
        if getattr(settings, name) != ServeSettings.model_fields[name].default
    ]
    log, limits = settings.access_log, "; ".join(changed)
    playground = "at /playground/" if has_playground(settings) else "not served"
    return [
        f"  access           {_access(settings)}",
        *([] if log == "requests" else [f"  access log       {log}"]),
        *([] if settings.playground == "auto" else [f"  playground       {playground}"]),
        *([f"  limits           {limits}"] if limits else []),
    ]


def _weight_lines(
    settings: ServeSettings, outlook: Outlook, loaded: Checkpoint | None
) -> list[str]:
    """Return the lines about weights that are not stored as they are served, and roundings."""
    outline, low_bits, lines = outlook.outline, outlook.low_bits, []
    if outline.stored is not None:
        text = f"stored in {outline.stored}, served in {_name(outline.dtype)}"
        if low_bits is None:
            text += f", {size_text(outline.num_weight_bytes())}"
        if outline.stored.has_activations:
            text += "; activations are not quantised"
        lines.append(f"  weights          {text}")
    if low_bits is not None:
        distance: object = None if loaded is None else loaded.distance
        if loaded is None and settings.weights == "int8":
            distance = _MEASURED
        floats = size_text(low_bits.float_bytes)
        lines.append(
            f"  weights          {low_bits.formats}, {size_text(low_bits.num_bytes)} with scales "
            f"and {floats} of floats; {distance or 'the values of the file'}"
        )
    rounded = "int8" if low_bits is not None and low_bits.is_rounding else settings.activations
    if rounded in {"int8", "fp8"}:
        distance = _MEASURED if loaded is None else loaded.rounding
        cells = {"fp8": "row, or 128 inputs of it", "int8": f"{INT8.group} inputs"}
        text = f"{rounded} with a scale for each {cells[rounded]}; {distance}"
        if settings.activations == "auto":
            text += "; --activations exact rounds none"
        lines.append(f"  activations      {text}")
    return lines


def _rank_lines(settings: ServeSettings, outlook: Outlook, ranks: "Ranks | None") -> list[str]:
    """Return the line about several ranks; none for one process."""
    if outlook.rank_weight_bytes is None:
        return []
    bits = "within rounding"
    if ranks is not None and ranks.has_same_bits:
        bits = "same bits as one"
    elif ranks is None and outlook.outline.device.type == "cpu":
        bits = "bits found at load"
    return [
        f"  tensor parallel  {settings.tensor_parallel_size} ranks, {bits}; each has "
        f"{size_text(outlook.rank_weight_bytes)} of weights and "
        f"{size_text(outlook.plan.rank_cache_bytes)} of cache"
    ]


def _threads(settings: ServeSettings, device: torch.device, loaded: Checkpoint | None) -> str:
    """Return a clause with the threads of torch; none for a GPU. A load has set them."""
    if device.type != "cpu":
        return ""
    found = torch.get_num_threads()
    if loaded is None:
        found = settings.threads or max(1, found // settings.tensor_parallel_size)
    return f", {counted(found, 'thread')}"


def _attention(settings: ServeSettings, device: torch.device) -> str:
    """Return what reads the cache, and on a GPU what reads prompts."""
    if device.type != "cuda":
        return described(device)
    if settings.exact_batches:
        return f"{described(device)}, in one order of sums"
    least = long_prompt_tokens(device)
    long = f", from {least} tokens flash attention 4" if least else ""
    return f"{described(device)}, prompts by flash attention 2{long}"


def _torch_lines() -> list[str]:
    """Return a line if the build of torch does not fit the machine's GPU, or none."""
    build = TorchBuild(
        torch.__version__,
        torch.version.cuda,
        getattr(torch.version, "hip", None),
        torch.cuda.is_available(),
    )
    found = mismatch(build, has_node=has_nvidia_gpu())
    return [] if found is None else [f"  warning          {found.text}; {found.action}"]


def _chat_lines(settings: ServeSettings, formats: ChatFormats) -> list[str]:
    """Return the line about tool calls and reasoning; none if the template has neither."""
    tools = "not served"
    if formats.tools is not None:
        if not formats.tools.in_template and formats.reasoning is None:
            return []
        where = "of the chat template" if formats.tools.in_template else "with our instructions"
        tools = f"{formats.tools.name}, {where}"
    if formats.reasoning is not None:
        tools += f"; reasoning: {formats.reasoning.open} ({settings.reasoning})"
    return [f"  tool calls       {tools}"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _access(settings: ServeSettings) -> str:
    """Describe keys and origins. The keys themselves are secrets."""
    with_key = bool(settings.api_key) or settings.api_key_file is not None
    who = "clients with a key" if with_key else "every client that reaches the port, without a key"
    if with_key and settings.open_metrics:
        who += " (/metrics without)"
    if settings.keys:
        who += f", bounded: {', '.join(entry.name for entry in settings.keys)}"
    origins = ", ".join(settings.allowed_origins)
    who = f"{who}; web pages of {origins}" if origins else who
    hosts = ", ".join(settings.allowed_hosts)
    return f"{who}; hosts {hosts}" if hosts else who


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return repr(value) if isinstance(value, str) else str(value)
