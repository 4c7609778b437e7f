"""Build an engine with an allocated cache from a checked checkpoint and its limits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.quantised.page_format import EXACT, FIXED8
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.config import DEFAULT_DRAFT_TOKENS, EngineConfig, with_slots
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.load_faults import faults_of
from ropewalk.model_runtime.page_groups import refuse_releases
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.backends import (
    backend_for,
    check_windows,
    exact_backend,
    long_prompt_tokens,
    new_store,
    state_store,
)
from ropewalk.model_runtime.runner.cuda_graphs import (
    CaptureLimits,
    cuda_recorder,
)
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.prompt_graphs import LEAST_TOKENS
from ropewalk.model_runtime.runner.sampler import SamplingRow, sample_rows
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

_WARM_UP_TOKENS = 32  # so many that the last layer is pruned (last_layer.py)


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    observer: Observer | None = None,
    profiles: Iterable[Profile] = (),
    make: Callable[..., ModelRunner] = ModelRunner,
) -> Engine:
    """Allocate the cache and build the engine; the caller starts it.

    Rotation tables of `profiles` are built now, others when a request first needs them. They have
    their memory from the start, up to num_rope_tables.
    `make`: another class of model runner, for comparisons or for several ranks. Raises ModelError.
    """
    with faults_of(type(checkpoint.model).__name__, checkpoint.dtype, checkpoint.device):
        return _built(checkpoint, config, observer, tuple(profiles), make)


def _built(
    checkpoint: Checkpoint,
    config: EngineConfig,
    observer: Observer | None,
    profiles: Sequence[Profile],
    make: Callable[..., ModelRunner],
) -> Engine:
    # Several ranks give a function that also builds the runners of the others.
    if config.kv_cache_dtype != EXACT and not isinstance(make, type):
        raise ModelError(f"kv_cache_dtype {config.kv_cache_dtype} is for a model in one process")
    if config.page_groups.has_windows and checkpoint.states:
        raise ModelError("page_groups are for models without states")
    config = replace(config, max_draft_tokens=draft_tokens(checkpoint, config))
    layout = layout_of(checkpoint, config)
    config = _slotted(config, layout)
    runner = build_runner(checkpoint, config, profiles, make)
    is_captured = captures_graphs(checkpoint, config)
    # Nothing is cached yet, so any page will do.
    page = config.num_pages if is_captured else 0
    num_long = 0 if checkpoint.exact_batches else long_prompt_tokens(checkpoint.device)
    for profile in first_of_each_kind(profiles):
        # On a CPU, a load compiles the plain kernels. Ranges of keys and other caches have others.
        is_rare = profile.positions is not None or config.kv_cache_dtype != EXACT
        if checkpoint.device.type == "cuda" or is_rare:
            warm_up(runner, profile, page, config, num_long)
    if is_captured:
        num_tokens = captured_tokens(checkpoint, config, profiles, make)
        limits = CaptureLimits(
            config.max_model_len,
            config.max_decode_rows,
            spare_page=config.num_pages,
            max_prompt_rows=captured_rows(config, num_tokens),
            max_prompt_tokens=num_tokens,
        )
        runner.capture_graphs(limits, cuda_recorder(checkpoint.device))
        torch.cuda.empty_cache()  # memory of the warm-up runs on the capture stream
    lower_store = None
    if config.lower_store_setting is not None:
        from ropewalk.model_runtime.engine.kv_disk.build import build_lower_store  # noqa: PLC0415  # rare

        lower_store = build_lower_store(checkpoint, config, runner.store)
    eos_token_ids = checkpoint.eos_token_ids
    return Engine(
        runner, checkpoint.tokenizer, config, eos_token_ids, observer, lower_store=lower_store
    )


def _slotted(config: EngineConfig, layout: CacheLayout) -> EngineConfig:
    """Return `config` with slots if the model has states and no number of them is stated."""
    return config if config.num_state_slots else with_slots(config, layout.slot_bytes)


def layout_of(checkpoint: Checkpoint, config: EngineConfig) -> CacheLayout:
    """Return the layout of the cache that these limits ask for, of one rank."""
    form = config.page_size, config.kv_cache_dtype
    return checkpoint.cache_layout(*form, config.page_groups)


def draft_tokens(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the most tokens of a draft; by default none if they could change an answer's bits.

    Raises ModelError if drafts are asked for and not served.
    """
    if config.max_draft_tokens is not None:
        if config.max_draft_tokens and checkpoint.states and checkpoint.device.type != "cpu":
            raise ModelError(
                "max_draft_tokens must be 0 for a model with states on a GPU, got "
                f"{config.max_draft_tokens}"
            )
        return config.max_draft_tokens
    return DEFAULT_DRAFT_TOKENS if checkpoint.report.bitwise else 0


def first_of_each_kind(profiles: Sequence[Profile]) -> Iterable[Profile]:
    """Return the first profile without a position method, and the first with one."""
    return {profile.positions is None: profile for profile in reversed(profiles)}.values()


def build_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    profiles: Iterable[Profile] = (),
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelRunner:
    """Build the engine's model runner over a new cache. Raises ModelError if memory is short.

    `make`: another class of model runner, for several ranks.
    """
    page_size, layout = config.page_size, layout_of(checkpoint, config)
    profiles = tuple(profiles)
    refuse_releases(profiles, (plan.layer_type for plan in checkpoint.plans.values()))
    check_windows(layout, checkpoint.plans)
    config = _slotted(config, layout)
    try:
        # One extra page for the padding of a captured step.
        num_spare = 1 if captures_graphs(checkpoint, config) else 0
        num_pages, num_tails = config.num_pages + num_spare, config.max_num_seqs + num_spare
        store = new_store(
            layout,
            num_pages,
            checkpoint.device,
            num_tails=num_tails,
            scales=checkpoint.scales if config.kv_cache_dtype == FIXED8 else None,
        )
        states = state_store(checkpoint.states, config.num_state_slots, checkpoint.device)
    except (MemoryError, RuntimeError) as error:  # the latter by torch on a GPU
        slots = f" beside {config.num_state_slots} slots of states" if checkpoint.states else ""
        raise ModelError(
            f"there is no memory for a KV cache of {config.kv_cache_tokens} tokens{slots}: {error}"
        ) from error
    room = max(config.num_rope_tables, len(profiles))
    tables = RopeTables(checkpoint.native, page_size, config.max_model_len, checkpoint.device, room)
    for profile in profiles:
        tables.id_of(profile)
    # No class for several ranks takes these.
    more: dict[str, object] = {} if states is None else {"states": states}
    if checkpoint.exact_batches:
        more["backend"] = exact_backend()
    return make(checkpoint.model, checkpoint.plans, store, tables, page_size, **more)


def warm_up(
    runner: ModelRunner,
    profile: Profile,
    page: int,
    config: EngineConfig,
    num_long_tokens: int = 0,
) -> None:
    """Run a prompt, and a prompt beside decodes, so that no request waits for a compilation.

    Every layer launches all of its kernels: with all rows, and with those that need logits. Pages
    that are quantised are filled and crossed, too. Then a token is drawn with every kernel of
    a draw. The steps write only to `page`, which no sequence may hold. `num_long_tokens`: of the
    shortest prompt that has kernels of its own; 0: none has.
    """
    table_id = runner.table_id(profile)

    def prompt_of(num: int) -> Span:
        pages = [page] * (-(-num // config.page_size) * config.num_groups)
        return Span([0] * num, 0, pages, table_id, range(num - 1, num), (StatePart(num, None, 0),))

    num_tokens = min(_WARM_UP_TOKENS, config.max_model_len)
    prompt, decode = prompt_of(num_tokens), prompt_of(1)
    scored = prompt._replace(logit_rows=range(num_tokens))
    for spans in ([prompt], [decode, prompt, decode], [decode, scored]):
        logits_RV = runner.run(spans)
    if 0 < num_long_tokens <= min(config.max_model_len, config.max_num_batched_tokens):
        runner.run([prompt_of(num_long_tokens)])
    drawn = SamplingRow(SamplingParams(top_p=0.9, top_k=20), 0, frozenset())
    sample_rows(logits_RV[:1], [0], [drawn])
    if config.kv_cache_dtype != EXACT:
        runner.run([decode])  # a step within one page can be one compiled call
    if config.quantises_pages:  # and one across pages is a call for each layer
        first = min(config.page_size - 1, config.max_model_len - num_tokens)
        runner.run([prompt._replace(first_position=first, pages=[page] * 2 * config.num_groups)])
    if config.num_state_slots and config.max_draft_tokens:
        # A draft beside states needs the model's own forward, which other steps do not run. Its
        # numbers can have other types than those of the layers in one call.
        drafted = StatePart(1, None, 0), StatePart(1, 0, 0, is_draft=True)
        runner.run([Span([0, 0], 0, prompt.pages, table_id, range(2), drafted)])


def captured_tokens(
    checkpoint: Checkpoint,
    config: EngineConfig,
    profiles: Iterable[Profile],
    make: Callable[..., ModelRunner],
) -> int:
    """Return the most tokens of a captured step whose prompts are no rows (prompt_graphs.py).

    0: there is none, because a part of it is queued, or the lists of exact batches have no room for
    other prompts.
    """
    is_alone = isinstance(make, type) and not checkpoint.exact_batches
    has_methods = any(profile.positions is not None for profile in profiles)
    return config.max_prompt_rows if is_alone and not has_methods else 0


def captured_rows(config: EngineConfig, num_tokens: int) -> int:
    """Return the most rows of a captured step with prompts as rows; longer ones are no rows.

    `num_tokens`: of `captured_tokens`.
    """
    most = config.max_prompt_rows
    return min(most, LEAST_TOKENS) if num_tokens >= LEAST_TOKENS else most


def captures_graphs(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    """Return whether the engine captures its decode steps as CUDA graphs (cuda_graphs.py)."""
    return backend_for(checkpoint.device).can_capture and not config.enforce_eager
