"""The serving plan that `config check` prints, made without loading weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ropewalk.model_runtime.attention.sealed.page_format import (
    check_format,
    open_bytes,
    refuse_sealed_on,
    rounds,
    seals,
    stage_page_bytes,
    token_bytes,
)
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.memory.cache_size import affordable_bytes, gpu_bytes
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory, machine_memory
from ropewalk.model_runtime.loading.hub.local_model import is_hub_id
from ropewalk.model_runtime.loading.known_products import expected_computing
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.low_bits.sizes import Storage
from ropewalk.model_runtime.loading.model_config import (
    ModelConfig,
    read_model_config,
    read_outline,
    read_plain_outline,
)
from ropewalk.model_runtime.loading.notes import notes_of
from ropewalk.model_runtime.loading.phases import OnPhase, no_phases
from ropewalk.model_runtime.loading.plain_config import (
    PlainConfig,
    plain_templates,
    refuse_absent,
)
from ropewalk.model_runtime.size_text import size_text
from ropewalk.model_runtime.state_shape import bytes_per_state
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.tools.find_format import find_formats
from ropewalk.model_runtime.text.tools.tool_format import GENERIC, REASONING_FORMATS
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.gate import Problems
from ropewalk.server.startup.load_model import find_model
from ropewalk.server.startup.planning.banner_lines import (
    chat_line,
    computing_line,
    describe,
    draft_line,
    expert_lines,
    limit_lines,
    rank_line,
    stored_text,
    warning_lines,
)
from ropewalk.server.startup.planning.format_advice import format_advice
from ropewalk.server.startup.planning.planned_deployments import plan_deployments
from ropewalk.server.startup.planning.serving_plan import (
    ModelFacts,
    ServingPlan,
    plan_layout,
    plan_serving,
)
from ropewalk.server.startup.planning.template_of import chat_template_of


@dataclass(frozen=True, slots=True)
class Outlook:
    """A serving plan for a model that has not been loaded."""

    outline: ModelConfig
    plan: ServingPlan
    num_weight_bytes: int | None  # None: a hub id without weights in the cache
    rank_weight_bytes: int | None  # of one process of several; None: there is one
    low_bits: Storage | None  # of weights in few bits; None: all are floats
    template: str  # of chats
    template_problem: str | None  # on a plain conversation
    left_out: tuple[str, ...] = ()  # a sentence for each value of its files that is not used
    advice: str | None = None  # if a context does not fit the memory


def outline_of(settings: ServeSettings, on_phase: OnPhase = no_phases) -> ModelConfig:
    """Read the config of the settings' model, or of the embedded one. Raises ModelError.

    The config and the tokenizer of a hub id are downloaded, and its weights are not.
    """
    refuse_absent(settings.device, settings.dtype)
    found = find_model(settings, weights=False, on_phase=on_phase)
    return read_outline(
        found.folder,
        has_weights=found.has_weights,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def refuse_before_listening(settings: ServeSettings) -> None:
    """Raise ModelError or SettingsError for an absent model, and for wrong deployments.

    A wrong tokenizer or chat template is reported with them, and not looked for without them.
    Nothing is downloaded, and torch is not imported: other models are checked by `refuse_ahead`.
    """
    if settings.model is not None and is_hub_id(settings.model):
        return
    found = find_model(settings, weights=False)
    outline = read_plain_outline(
        found.folder,
        dtype=settings.dtype,
        device=settings.device,
        has_weights=found.has_weights,
    )
    if outline is None:
        return
    try:
        plan_deployments(settings, outline.native())
    except SettingsError:
        _chats_and_deployments(settings, outline)
        raise


def _chats_and_deployments(
    settings: ServeSettings, outline: ModelConfig
) -> tuple[ChatTemplate, tuple[Deployment, ...]]:
    """Return both. Raises ModelError or SettingsError for a wrong tokenizer, or either of them."""
    problems = Problems()
    template = problems.tried(lambda: _template_of(settings, outline))
    deployments = problems.tried(lambda: plan_deployments(settings, outline.native()))
    problems.refuse()
    assert template is not None, "it was tried without a problem"
    assert deployments is not None, "they were tried without a problem"
    return template, deployments


def refuse_ahead(settings: ServeSettings, on_phase: OnPhase = no_phases) -> None:
    """Raise ModelError or SettingsError for what `serve` would refuse after its imports.

    torch is imported only where the config cannot be read without it, and weights are not read.
    """
    outline = outline_of(settings, on_phase)
    _chats_and_deployments(settings, outline)
    num_bytes = _storage(settings, outline)[0] or 0
    rank_bytes = num_bytes // settings.tensor_parallel_size
    is_sized = settings.kv_cache_gib is not None or settings.kv_cache_tokens is not None
    if is_sized or outline.device.type == "cpu":
        plan_serving(settings, _facts(settings, outline, rank_bytes, machine_memory()))
    else:  # the size is measured on the GPU
        plan_layout(settings, _facts(settings, outline, rank_bytes, machine_memory()))


def outlook_of(settings: ServeSettings) -> Outlook:
    """Read the model's config and tokenizer, and plan. Raises ModelError or SettingsError.

    The architecture is not checked, because only loading shows whether it is supported. Memory that
    other processes use may be free later, so it refuses nothing.
    """
    outline = outline_of(settings)
    rank_bytes = _rank_weight_bytes(settings, outline)
    template, deployments = _chats_and_deployments(settings, outline)
    num_weight_bytes, low_bits = _storage(settings, outline)
    host = machine_memory()
    host = replace(host, free=host.total)

    def plan_of(changed: ServeSettings) -> ServingPlan:
        own_bytes = rank_bytes or num_weight_bytes or 0
        return plan_serving(changed, _facts(changed, outline, own_bytes, host))

    plan, advice = _advised_plan(settings, max(each.max_len for each in deployments), plan_of)
    chats = template.text, template.plain_problem
    left_out = notes_of(outline)
    return Outlook(outline, plan, num_weight_bytes, rank_bytes, low_bits, *chats, left_out, advice)


def _advised_plan(
    settings: ServeSettings, wanted: int, plan_of: Callable[[ServeSettings], ServingPlan]
) -> tuple[ServingPlan, str | None]:
    """Return the plan, and advice if it holds less than `wanted` tokens. Raises as `plan_of`."""
    try:
        plan = plan_of(settings)
    except SettingsError as error:
        advice = format_advice(settings, wanted, 0, plan_of)
        if advice is None:
            raise
        between = "\n" if "\n" in str(error) else "; "  # it is not about the last of several lines
        raise SettingsError(f"{error}{between}{advice}") from error
    held = max(each.max_len for each in plan.deployments)
    return plan, None if held >= wanted else format_advice(settings, wanted, held, plan_of)


def _storage(settings: ServeSettings, outline: ModelConfig) -> tuple[int | None, Storage | None]:
    """Return the bytes of the loaded weights, None without files, and how few bits are stored."""
    is_divided = settings.tensor_parallel_size > 1
    low_bits = planned_storage(
        outline, settings.weights, settings.activations, is_divided=is_divided
    )
    return outline.num_weight_bytes() if low_bits is None else low_bits.num_bytes, low_bits


def _facts(
    settings: ServeSettings, outline: ModelConfig, rank_bytes: int, host: MachineMemory
) -> ModelFacts:
    """Return the facts about a model with `rank_bytes` of weights in each process.

    `host`: the memory of the machine. Raises ModelError if the model has no pages in the format of
    its cache.
    """
    num_ranks = settings.tensor_parallel_size
    memory = host if outline.device.type == "cpu" else None
    # On a CPU the ranks share the memory; GPUs have their own.
    to_come = rank_bytes if memory is None else rank_bytes * num_ranks
    affordable = affordable_bytes(outline.device, settings.gpu_memory_utilization, to_come)
    check_format(settings.kv_cache_dtype, outline.layers(), outline.dtype)
    if seals(settings.kv_cache_dtype):
        refuse_sealed_on(outline.device, settings.kv_cache_dtype)
    form = (outline.layers(), outline.dtype, settings.kv_cache_dtype, settings.page_size)
    return ModelFacts(
        outline.native(),
        token_bytes(*form),
        affordable * num_ranks if memory is None else affordable,
        num_ranks=num_ranks,
        memory=memory,
        gpu_bytes=gpu_bytes(outline.device),
        host=host,
        weight_bytes=to_come,
        slot_bytes=bytes_per_state(outline.states()),
        drafts_states=outline.device.type == "cpu",
        open_bytes=open_bytes(*form),
        stage_page_bytes=stage_page_bytes(*form),
        rounds=rounds(outline.dtype, settings.kv_cache_dtype),
        windows=outline.windows(),
        shapes=outline.layers(),
    )


def _rank_weight_bytes(settings: ServeSettings, outline: ModelConfig) -> int | None:
    """Return the bytes of one rank's weights; None for a single process.

    Raises ModelError if the model cannot be divided. Only such a plan needs torch.
    """
    size = settings.tensor_parallel_size
    if size == 1:
        return None
    from ropewalk.model_runtime.parallel.plan import check_devices, plan_of  # noqa: PLC0415

    outline = read_model_config(
        outline.source,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        has_weights=outline.has_weights,
    )
    check_devices(size, settings.device, outline.device)
    plan = plan_of(outline, size, trust_remote_code=settings.trust_remote_code)
    return plan.num_rank_parameters * outline.dtype.itemsize


def _tried_template(
    settings: ServeSettings,
    own: Callable[[], Mapping[str, str]],
    special_tokens: Mapping[str, str] | None = None,
) -> ChatTemplate:
    """Return the chat template, after a few conversations. Raises ModelError or SettingsError."""
    template = chat_template_of(settings, own, special_tokens)
    # For its refusals only: the ids of special tokens are not known without a tokenizer.
    find_formats(template, {}, settings.tool_format)
    return template


def _template_of(settings: ServeSettings, outline: ModelConfig) -> ChatTemplate:
    """Return the template of chats, read without transformers if the tokenizer is a plain one."""
    source = Path(outline.source)
    if isinstance(outline.config, PlainConfig) or source.is_file():  # a file in GGUF
        found = plain_templates(source)
        if found is not None:
            template = _tried_template(settings, lambda: found)
            if template.plain_problem is None:
                return template
            # The special tokens, which only a whole tokenizer tells, may be all that it lacks.
            if source.is_file():
                return _tried_template(settings, lambda: found, _special_tokens(source))
    from ropewalk.model_runtime.loading.files.pretrained import load_tokenizer  # noqa: PLC0415  # seconds

    tokenizer = load_tokenizer(outline.source, trust_remote_code=settings.trust_remote_code)
    return _tried_template(settings, tokenizer.own_templates, tokenizer.special_tokens_map)


def _special_tokens(source: Path) -> Mapping[str, str]:
    """Return the special tokens of a GGUF file. Raises ModelError."""
    from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415
    from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import read_tokenizer  # noqa: PLC0415

    return read_tokenizer(read_gguf(source)).special_tokens


def _stored_lines(outlook: Outlook) -> list[str]:
    """Return the line about weights that are dequantised; none for any other checkpoint."""
    outline = outlook.outline
    if outline.stored is None:
        return []
    num_bytes = None if outlook.low_bits is not None else outlook.num_weight_bytes
    text = stored_text(outline.stored, outline.dtype, num_bytes)
    return [f"  weights          {text}"]


def _rank_lines(settings: ServeSettings, outlook: Outlook) -> list[str]:
    """Return the line about several ranks; none for one process."""
    if outlook.rank_weight_bytes is None:
        return []
    size, cache_bytes = settings.tensor_parallel_size, outlook.plan.rank_cache_bytes
    is_on_cpu = outlook.outline.device.type == "cpu"
    bits = "a load tells their bits" if is_on_cpu else "within rounding"
    return [rank_line(size, bits, outlook.rank_weight_bytes, cache_bytes)]


def _chat_line(settings: ServeSettings, template: str) -> list[str]:
    """Return what the text of a chat template tells about tool calls and reasoning.

    Only a loaded tokenizer renders it, so the format that a template for tools writes is not known.
    """
    tools = {"auto": None, "none": "not served"}.get(settings.tool_format, settings.tool_format)
    if settings.tool_format == "auto" and "tools" not in template:
        tools = f"{GENERIC.name}, with our instructions"
    opening = next((each.open for each in REASONING_FORMATS if each.close in template), None)
    return chat_line(tools, None if opening is None else f"{opening} ({settings.reasoning})")


def outlook_lines(settings: ServeSettings, outlook: Outlook) -> list[str]:
    """Return the banner lines of `serve`, with the memory that it would take."""
    outline, plan = outlook.outline, outlook.plan
    dtype = str(outline.dtype).removeprefix("torch.")
    weights = "weights not counted (they are not on this machine)"
    if outlook.num_weight_bytes is not None:
        weights = f"{size_text(outlook.num_weight_bytes)} weights"
    storage = outline.gguf_storage()
    products, attention, numbers = expected_computing(outline.device, outline.dtype)
    if outlook.low_bits is not None:
        products = outlook.low_bits.products(numbers)
        weights += f" in {outlook.low_bits.formats}"
    if storage is not None:
        how = "dequantised from" if outlook.low_bits is None else "from"
        weights += f" ({how} {size_text(storage[0])} of GGUF, {storage[1]})"
    memory = f"{weights}, {size_text(plan.cache_bytes)} cache"
    if outline.device.type == "cpu":
        machine = machine_memory()
        memory += f", of {size_text(machine.total)} ({size_text(machine.free)} are free now)"
    elif settings.kv_cache_gib is None and settings.kv_cache_tokens is None:
        memory += " (estimated: `serve` runs a step of the model and sizes the cache by that)"
    is_on_gpu = outline.device.type == "cuda"
    has_same_bits = False if is_on_gpu else None  # on a CPU the self-check tells
    return [
        f"  model            {settings.model or 'the embedded one'}: {outline.architecture}, "
        f"{outline.device}, {dtype}",
        *_stored_lines(outlook),
        *expert_lines(outlook.outline, outlook.low_bits),
        *_rank_lines(settings, outlook),
        *describe(plan),
        *([] if outlook.advice is None else [f"    does not fit   {outlook.advice}"]),
        *limit_lines(settings),
        *_chat_line(settings, outlook.template),
        *warning_lines(outlook.template_problem, *outlook.left_out),
        computing_line(products, attention, has_same_bits=has_same_bits),
        draft_line(settings.max_draft_tokens, is_on_gpu=is_on_gpu, is_exact=has_same_bits),
        f"  memory           {memory}",
        f"  would listen on  {settings.host}, port {settings.port}",
        "  not checked      whether the address is free, and whether the architecture can be taken "
        "over: loading it shows",
    ]
