"""Build a service that is ready to start; the only place that combines its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.experts.low_bit import has_experts
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.hub.wanted import OnBytes, no_bytes
from ropewalk.model_runtime.loading.model_config import read_outline
from ropewalk.model_runtime.loading.phases import OnPhase, no_phases
from ropewalk.model_runtime.runner.backends import described, long_prompt_tokens
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.text.tools.find_format import ChatFormats, find_formats
from ropewalk.rope import NativeRope
from ropewalk.server.access.allowance import KeyMetrics
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.keys import KeyTable
from ropewalk.server.access.open_request import AnswerWatch, Put
from ropewalk.server.api.output_queue import OutputQueue
from ropewalk.server.api.service import Fingerprint, Service
from ropewalk.server.errors import rejection_reasons
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.middleware.http_metrics import HttpMetrics
from ropewalk.server.process.torch_build import TorchBuild, has_nvidia_gpu, mismatch
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.load_model import load_model
from ropewalk.server.startup.planning.banner_lines import (
    chat_line,
    computing_line,
    describe,
    draft_line,
    expert_lines,
    limit_lines,
    low_bits_text,
    rank_line,
    rounding_text,
    self_check_line,
    stored_text,
    warning_lines,
)
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.planned_deployments import plan_deployments, profiles_of
from ropewalk.server.startup.planning.serving_plan import ServingPlan, plan_serving
from ropewalk.server.startup.planning.template_of import chat_template_of

if TYPE_CHECKING:
    from ropewalk.model_runtime.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about a loaded model that the routes need."""

    plan: ServingPlan
    native: NativeRope
    vocab_size: int
    sampling_defaults: Mapping[str, float]
    is_on_gpu: bool
    has_same_bits: bool  # in any batch
    banner: str
    max_new_tokens: int | None  # of every answer; None: any number


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in this process, and in those that hold it together with this one."""

    checkpoint: Checkpoint
    served: ServedModel
    ranks: "Ranks | None"  # None: it is in this process alone

    def engine(self, metrics: Metrics) -> Engine:
        """Allocate the cache and build the engine. Raises ModelError."""
        plan, ranks = self.served.plan, self.ranks
        make = ModelRunner if ranks is None else ranks.runner
        profiles = profiles_of(plan.deployments)
        engine = build_engine(self.checkpoint, plan.config, metrics, profiles, make)
        if ranks is not None:
            ranks.watch(engine.fail)
        return engine


def load_service(
    settings: ServeSettings,
    on_phase: OnPhase = no_phases,
    on_bytes: OnBytes = no_bytes,
    keys: KeyTable | None = None,
) -> tuple[Service, str]:
    """Load the model, and return the service and its banner.

    `on_phase` hears of each phase, and `on_bytes` of the bytes of a download. `keys` are those that
    requests must present; none: no key is asked for.

    Raises model_runtime's ModelError, or SettingsError; the message is a sentence.
    """
    loaded = load_served(settings, on_phase, on_bytes)

    def make_engine(metrics: Metrics) -> Engine:
        on_phase("allocating the cache")
        return loaded.engine(metrics)

    tokenizer = loaded.checkpoint.tokenizer
    service = make_service(
        settings,
        loaded.served,
        tokenizer,
        make_engine,
        keys=keys,
        fingerprint=_fingerprint(settings, loaded, on_phase),
    )
    service.grammars.prepare()  # now, because it would stop the streams of other clients
    return service, loaded.served.banner


def _fingerprint(
    settings: ServeSettings, loaded: LoadedModel, on_phase: OnPhase
) -> Fingerprint | None:
    """Return the fingerprint; None if no router is trusted. Raises ModelError."""
    if settings.router_key is None:
        return None
    from ropewalk.server.startup.fingerprint import make_fingerprint  # noqa: PLC0415  # rare

    template, _ = _chat_of(settings, loaded.checkpoint.tokenizer, loaded.served.vocab_size)
    config = loaded.served.plan.config
    # Now, because a router sends no request to a server that is ready and has none.
    on_phase("hashing the weights")
    try:
        return make_fingerprint(loaded.checkpoint, config, settings, template)
    except OSError as error:
        raise ModelError(f"The weights cannot be hashed for router_key: {error}") from error


def load_served(
    settings: ServeSettings, on_phase: OnPhase = no_phases, on_bytes: OnBytes = no_bytes
) -> LoadedModel:
    """Load and check the model, and plan its serving. Raises ModelError or SettingsError."""
    # A wrong deployment is refused before the weights are read, which may take minutes.
    check_native = partial(plan_deployments, settings)
    ranks = _ranks(settings)
    checkpoint = load_model(settings, on_phase, on_bytes, check_native, ranks)
    template, formats = _chat_of(settings, checkpoint.tokenizer, checkpoint.vocab_size)
    make = ModelRunner if ranks is None else ranks.runner
    plan = plan_serving(settings, facts_of(checkpoint, settings, make))
    override = dict(settings.override_generation_config or {})
    max_new_tokens = override.pop("max_new_tokens", None)
    served = ServedModel(
        plan,
        checkpoint.native,
        checkpoint.vocab_size,
        {**checkpoint.sampling_defaults, **override},
        checkpoint.device.type == "cuda",
        checkpoint.report.bitwise,
        _banner(checkpoint, plan, settings, _chat_lines(template, formats, settings), ranks),
        max_new_tokens,
    )
    return LoadedModel(checkpoint, served, ranks)


def make_service(
    settings: ServeSettings,
    served: ServedModel,
    tokenizer: Tokenizer,
    make_engine: Callable[[Metrics], Engine],
    *,
    keys: KeyTable | None = None,
    fingerprint: Fingerprint | None = None,
) -> Service:
    """Build the service of a model over the engine that `make_engine` returns.

    `fingerprint`: of the model, for a router that is trusted.
    """
    chat_template, chat_formats = _chat_of(settings, tokenizer, served.vocab_size)
    factory = MetricFactory()
    output_queue = OutputQueue()
    ring = KeyRing(keys, KeyMetrics(factory)) if keys is not None and keys.keys else None
    is_watched = ring is not None or settings.access_log != "off" or settings.traces
    metrics = metrics_of(factory, served.plan, output_queue.put if is_watched else None)
    deployments = served.plan.deployments
    return Service(
        is_on_gpu=served.is_on_gpu,
        has_same_bits=served.has_same_bits,
        settings=settings,
        engine=make_engine(metrics),
        tokenizer=tokenizer,
        native=served.native,
        deployments={deployment.name: deployment for deployment in deployments},
        aliases=dict(settings.model_aliases or {}),
        metrics=metrics,
        http_metrics=HttpMetrics(factory),
        vocab_size=served.vocab_size,
        sampling_defaults=served.sampling_defaults,
        max_new_tokens=served.max_new_tokens,
        max_len=served.plan.config.max_model_len,
        cache_bytes=served.plan.cache_parts,
        chat_template=chat_template,
        chat_formats=chat_formats,
        key_ring=ring,
        fingerprint=fingerprint,
        output_queue=output_queue,
        grammars=GrammarCompiler(
            tokenizer,
            num_rows=served.vocab_size,
        ),
    )


def _ranks(settings: ServeSettings) -> "Ranks | None":
    """Return the processes that hold the model together; None if it is this one alone."""
    if settings.tensor_parallel_size == 1:
        return None
    from ropewalk.model_runtime.parallel.ranks import Ranks  # noqa: PLC0415  # torch.distributed

    return Ranks(settings.tensor_parallel_size)


def _chat_of(
    settings: ServeSettings, tokenizer: Tokenizer, vocab_size: int
) -> tuple[ChatTemplate, ChatFormats]:
    """Return the chat template and its formats of calls. Raises ModelError or SettingsError."""
    template = chat_template_of(settings, tokenizer.own_templates, tokenizer.special_tokens_map)
    # A marker whose token the model has no row for can only come as text.
    special = {text: each for text, each in tokenizer.special_ids.items() if each < vocab_size}
    return template, find_formats(template, special, settings.tool_format)


def metrics_of(factory: MetricFactory, plan: ServingPlan, put: Put | None = None) -> Metrics:
    """Build the metrics; with `put` they also report the end of each answer."""
    parts = factory, plan.context_bounds, plan.config, rejection_reasons(), plan.cache_parts
    return Metrics(*parts) if put is None else AnswerWatch(put, *parts)


def _rank_lines(checkpoint: Checkpoint, plan: ServingPlan, ranks: "Ranks | None") -> list[str]:
    """Return the line about the ranks of a model, or none."""
    if ranks is None:
        return []
    weight_bytes = ranks.plan.num_rank_parameters * checkpoint.dtype.itemsize
    bits = "same bits as one" if ranks.has_same_bits else "within rounding"
    return [rank_line(ranks.size, bits, weight_bytes, plan.rank_cache_bytes)]


def _attention(device: torch.device) -> str:
    """Return what reads the cache, and on a GPU what reads prompts."""
    if device.type != "cuda":
        return described(device)
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


def _chat_lines(template: ChatTemplate, formats: ChatFormats, settings: ServeSettings) -> list[str]:
    """Return the banner's lines about tool calls, reasoning and a template that fails."""
    tools = "not served"
    if formats.tools is not None:
        where = "of the chat template" if formats.tools.in_template else "with our instructions"
        tools = f"{formats.tools.name}, {where}"
    reasoning = "none known"
    if formats.reasoning is not None:
        reasoning = f"{formats.reasoning.open} ({settings.reasoning})"
    return [*chat_line(tools, reasoning), *warning_lines(template.plain_problem)]


def _banner(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    settings: ServeSettings,
    chat_lines: Sequence[str],
    ranks: "Ranks | None",
) -> str:
    """Return the banner, with the facts an operator needs before the first request."""
    where = f"{checkpoint.device}, {str(checkpoint.dtype).removeprefix('torch.')}"
    if checkpoint.device.type == "cpu":
        where += f", {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    weights = []
    if checkpoint.stored is not None:
        text = stored_text(checkpoint.stored, checkpoint.dtype, checkpoint.weight_bytes)
        weights = [f"  weights          {text}"]
    if checkpoint.low_bits is not None:
        text = low_bits_text(checkpoint.low_bits, checkpoint.distance)
        weights += [f"  weights          {text}"]
    if checkpoint.rounding is not None:
        weights += [f"  activations      {rounding_text(checkpoint.rounding)}"]
    if checkpoint.source is not None and has_experts(checkpoint.model):
        outline = read_outline(
            checkpoint.source,
            dtype=str(checkpoint.dtype).removeprefix("torch."),
            device=checkpoint.device.type,
            trust_remote_code=settings.trust_remote_code,
        )
        weights += expert_lines(outline, checkpoint.low_bits)
    return "\n".join(
        [
            f"  model            {type(checkpoint.model).__name__}, {where}",
            *weights,
            *_rank_lines(checkpoint, plan, ranks),
            *_torch_lines(),
            *describe(plan),
            *limit_lines(settings),
            *chat_lines,
            *warning_lines(*checkpoint.left_out),
            computing_line(
                checkpoint.products,
                _attention(checkpoint.device),
                has_same_bits=checkpoint.report.bitwise,
            ),
            draft_line(
                settings.max_draft_tokens,
                is_on_gpu=checkpoint.device.type == "cuda",
                is_exact=checkpoint.report.bitwise,
            ),
            self_check_line(has_same_bits=checkpoint.report.bitwise),
        ]
    )
