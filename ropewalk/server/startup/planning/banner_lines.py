"""The lines of the banner and of the dry run: the plan, access, limits and chats."""

from ropewalk.model_runtime.attention.sealed.page_format import ROUNDED
from ropewalk.model_runtime.config import DEFAULT_DRAFT_TOKENS, EngineConfig
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.formats.quantised_scheme import Scheme
from ropewalk.model_runtime.loading.low_bits.active import active_lines, active_part
from ropewalk.model_runtime.loading.low_bits.sizes import Storage
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.page.page_files import has_playground
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.request_sections import LimitSettings
from ropewalk.server.startup.planning.serving_plan import ServingPlan, memory_text

# Beside the section of limits: what fills the queue, and what a chat may set.
_NAMES = (
    *("max_queued_requests", "max_queued_prompt_tokens"),
    *LimitSettings.model_fields,
    "allowed_chat_template_kwargs",
)

_LARGE_SHARE = 0.25  # of a cache, for open pages; an operator should know


def describe(plan: ServingPlan) -> list[str]:
    """Return the lines that an operator should read before the first request."""
    lines = []
    for deployment in plan.deployments:
        limited = ""
        if deployment.is_cache_limited:
            limited = " (what the KV cache holds)"
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
            f"    requests       {_may_ask(deployment)}",
        ]
        if deployment.note is not None:
            lines.append(f"    warning        {deployment.note}")
    lines.append(f"  steps            {_steps(plan.config)}")
    pages = f"{plan.config.num_pages} pages of {plan.config.page_size}"
    size = size_text(plan.cache_parts["pages"])
    lines.append(f"  KV cache         {plan.capacity} tokens, {size} in {pages}")
    lines += _window_lines(plan)
    lines += _format_lines(plan)
    if plan.config.kv_offload_gib is not None:
        size = f"{plan.config.kv_offload_gib:g} GiB, {size_text(plan.token_bytes)} a token"
        lines.append(f"    in host memory {size}")
    if plan.config.kv_disk is not None:
        size = f"{plan.config.kv_disk_gib:g} GiB in {plan.config.kv_disk}"
        lines.append(f"    on disk        {size}, {size_text(plan.token_bytes)} a token")
    if plan.config.kv_store is not None:
        place = _store_place(plan.config.kv_store)
        lines.append(f"    in a store     {place}, {size_text(plan.token_bytes)} a token")
    if plan.state_bytes:
        slots = f"{plan.config.num_state_slots} slots of {size_text(plan.slot_bytes)}"
        others = "snapshots of prefixes" + (", and drafts" * (plan.config.max_draft_tokens != 0))
        lines.append(
            f"  states           {size_text(plan.state_bytes)} in {slots}; at most "
            f"{plan.config.max_num_seqs} sequences run, the other slots hold {others}"
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
    """Return a line if the cache does not hold the contexts that the tiers are for, or none."""
    longest = deployment.own_tiers[-1].ceiling
    if not deployment.is_cache_limited:
        return []
    return [
        f"    warning        the KV cache holds contexts of {deployment.max_len} tokens, and the "
        f"tiers are for {longest}; a larger kv_cache_gib or kv_cache_tokens holds more"
    ]


def _window_lines(plan: ServingPlan) -> list[str]:
    """Return the line about layers with a window; none if no layer has one that matters."""
    groups, config = plan.config.page_groups, plan.config
    if groups is None:
        if plan.why_whole is None:
            return []
        return [f"    windows        not held, all layers keep all tokens: {plan.why_whole}"]
    longest = min(config.max_model_len, config.longest_context)
    size = config.num_held_pages(longest) * plan.page_bytes
    return [
        f"    windows        {groups.text()}; {plan.token_bytes} bytes a token, "
        f"{groups.beyond(plan.token_bytes)} beyond the windows; a context of {longest} tokens "
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
    if plan.config.kv_cache_dtype == ROUNDED:
        text = f"{ROUNDED}, the numbers of the model: the same as auto"
        if plan.rounds:
            text = (
                f"{ROUNDED}, {plan.token_bytes} bytes a token (auto: {2 * plan.token_bytes}); keys "
                "and values are rounded when they are written"
            )
        return [f"    format         {text}"]
    if not plan.open_page_bytes:
        return []
    numbers = plan.open_page_bytes // plan.config.page_size
    lines = [
        f"    format         {plan.config.kv_cache_dtype}, {plan.token_bytes} bytes a token (auto: "
        f"{numbers}); {size_text(plan.open_bytes)} of open pages for {plan.config.max_num_seqs} "
        f"sequences, {size_text(plan.stage_bytes)} of pages that a step fills"
    ]
    both_bytes = plan.cache_bytes - plan.state_bytes
    if plan.open_bytes > _LARGE_SHARE * both_bytes:
        lines.append(
            f"    open pages     take {plan.open_bytes / both_bytes:.0%} of the cache: a lower "
            f"max_num_seqs than {plan.config.max_num_seqs} holds more tokens in the same memory"
        )
    return lines


def _may_ask(deployment: Deployment) -> str:
    """Describe what the `rope` object of a request may name."""
    methods = ", ".join(deployment.rope_types)
    if deployment.position_methods:
        methods += f" and positions {', '.join(deployment.position_methods)}"
    if deployment.serves_default_within_native:
        methods += f", default (up to {deployment.native_len} tokens)"
    policies = "any policy" if deployment.overridable else f"policy {deployment.policy} only"
    factors = f"factors up to {deployment.max_rope_factor:g}; "
    return f"may name {methods}; {factors if deployment.max_rope_factor > 1 else ''}{policies}"


def computing_line(products: str, attention: str, *, has_same_bits: bool | None) -> str:
    """Return the banner's line about products, attention and bits; the dry run prints it, too.

    `has_same_bits`: whether answers have the same bits in any batch; None: a load tells.
    """
    bits = "same in any batch" if has_same_bits else "depend on the batch"
    if has_same_bits is None:
        bits = "the self-check tells"
    return f"  products         {products}; attention: {attention}; bits: {bits}"


def stored_text(stored: Scheme, dtype: object, num_bytes: int | None) -> str:
    """Describe the weights of a quantised checkpoint; `num_bytes` is what they take once loaded."""
    served = f"served in {str(dtype).removeprefix('torch.')}"
    if num_bytes is not None:
        served += f", {size_text(num_bytes)}"
    note = "; activations are not quantised" if stored.has_activations else ""
    return f"stored in {stored}, {served}{note}"


def low_bits_text(storage: Storage, distance: object | None) -> str:
    """Describe weights in few bits: formats, all memory of weights, and what it changes.

    `distance` says how far int8 weights are from the stored ones; None: nothing was quantised.
    """
    text = (
        f"{storage.formats}, {size_text(storage.num_bytes)} with scales and "
        f"{size_text(storage.float_bytes)} of floats"
    )
    return f"{text}; {'the values of the file' if distance is None else distance}"


def rounding_text(distance: object) -> str:
    """Describe rounded activations; `distance` says how far that moves answers."""
    return f"int8 with a scale for each {INT8.group} inputs; {distance}"


def expert_lines(outline: ModelConfig, low_bits: Storage | None) -> list[str]:
    """Return the banner's lines about a mixture's active weights; none for another model."""
    active = active_part(outline, low_bits)
    return [f"  {line}" for line in active_lines(active, outline.device.type)]


def rank_line(size: int, bits: str, weight_bytes: int, cache_bytes: int) -> str:
    """Return the banner's line about ranks; `bits` says how answers compare with those of one."""
    return (
        f"  tensor parallel  {size} ranks, {bits}; a rank holds {size_text(weight_bytes)} of "
        f"weights and {size_text(cache_bytes)} of cache"
    )


def self_check_line(*, has_same_bits: bool) -> str:
    """Return the banner's line about the self-check, and what is promised of answers."""
    exact = "to the bit" if has_same_bits else "within rounding"
    return f"  self-check       passed; answers are the same in any batch {exact}"


def draft_line(asked: int | None, *, is_on_gpu: bool, is_exact: bool | None) -> str:
    """Return the banner's line about drafts.

    `asked`: max_draft_tokens. `is_exact`: whether no bit depends on a draft; None: a load tells.
    """
    most = DEFAULT_DRAFT_TOKENS if asked is None else asked
    is_default_off = asked is None and is_exact is False
    if not most:
        text = "off (max_draft_tokens 0)"
    elif is_default_off:
        text = f"off, because {_why_inexact(is_on_gpu=is_on_gpu)}; max_draft_tokens turns them on"
    elif is_exact is None:
        condition = " if the self-check finds the same bits in any batch" if asked is None else ""
        text = f"up to {most} tokens{condition}"
    elif is_exact:
        text = f"up to {most} tokens; no bit of an answer depends on them"
    else:
        text = (
            f"up to {most} tokens; each token is the one that the model chooses in its step, but "
            f"{_why_inexact(is_on_gpu=is_on_gpu)}"
        )
    return f"  drafts           {text}"


def _why_inexact(*, is_on_gpu: bool) -> str:
    where = "on a GPU" if is_on_gpu else "with this model"
    return f"{where} bits may depend on the draft"


def _steps(config: EngineConfig) -> str:
    """Return how large a step is, and how long one with prompts."""
    target = config.step_target_s
    return (
        f"up to {config.max_num_seqs} sequences (max_num_seqs) and "
        f"{config.max_num_batched_tokens} tokens (max_num_batched_tokens)"
        + ("" if target is None else f", {target:g} s while others decode")
    )


def limit_lines(settings: ServeSettings) -> list[str]:
    """Return who may ask, what is logged and served, and the limits that were changed."""
    changed = [
        f"{name} {_text(getattr(settings, name))}"
        for name in _NAMES
        if getattr(settings, name) != ServeSettings.model_fields[name].default
    ]
    return [
        f"  access           {_access(settings)}",
        f"  access log       {settings.access_log}",
        f"  playground       {'at /playground/' if has_playground(settings) else 'not served'}",
        f"  limits           {'; '.join(changed) or 'all at their defaults'}",
    ]


def chat_line(tools: str | None, reasoning: str | None) -> list[str]:
    """Return the line about tool calls and reasoning; None: not known, and left out."""
    if tools is None:
        return [] if reasoning is None else [f"  reasoning        {reasoning}"]
    return [
        f"  tool calls       {tools}" + ("" if reasoning is None else f"; reasoning: {reasoning}")
    ]


def warning_lines(*problems: str | None) -> list[str]:
    """Return the lines about what does not work or is left out; None: nothing."""
    return [f"  warning          {each}" for each in problems if each is not None]


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
