"""Build a service that is ready to start; the only place that combines its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.hub.wanted import OnBytes, no_bytes
from ropewalk.model_runtime.loading.phases import OnPhase, no_phases
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.tokenizer import Tokenizer
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
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.load_model import load_model
from ropewalk.server.startup.planning.banner_lines import Outlook, banner_lines
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.planned_deployments import plan_deployments, profiles_of
from ropewalk.server.startup.planning.serving_plan import ServingPlan, plan_serving
from ropewalk.server.startup.planning.template_of import chat_of

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
    loaded = load_served(settings, on_phase, on_bytes, remembers=True)

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

    template, _ = chat_of(settings, loaded.checkpoint.tokenizer, loaded.served.vocab_size)
    config = loaded.served.plan.config
    # Now, because a router sends no request to a server that is ready and has none.
    on_phase("hashing the weights")
    try:
        return make_fingerprint(loaded.checkpoint, config, settings, template)
    except OSError as error:
        raise ModelError(f"The weights cannot be hashed for router_key: {error}") from error


def load_served(
    settings: ServeSettings,
    on_phase: OnPhase = no_phases,
    on_bytes: OnBytes = no_bytes,
    *,
    remembers: bool = False,
) -> LoadedModel:
    """Load and check the model, and plan its serving. Raises ModelError or SettingsError.

    `remembers`: as `load_checkpoint` has it.
    """
    # A wrong deployment is refused before the weights are read, which may take minutes.
    check_native = partial(plan_deployments, settings)
    ranks = _ranks(settings)
    checkpoint = load_model(settings, on_phase, on_bytes, check_native, ranks, remembers=remembers)
    chat = chat_of(settings, checkpoint.tokenizer, checkpoint.vocab_size)
    make = ModelRunner if ranks is None else ranks.runner
    plan = plan_serving(settings, facts_of(checkpoint, settings, make))
    assert checkpoint.outline is not None
    rank_bytes = None
    if ranks is not None:
        rank_bytes = ranks.plan.num_rank_parameters * checkpoint.dtype.itemsize
    parts = checkpoint.low_bits, rank_bytes, *chat, checkpoint.left_out
    outlook = Outlook(plan, checkpoint.outline, *parts)
    banner = banner_lines(settings, outlook, checkpoint, ranks)
    override = dict(settings.override_generation_config or {})
    max_new_tokens = override.pop("max_new_tokens", None)
    served = ServedModel(
        plan,
        checkpoint.native,
        checkpoint.vocab_size,
        {**checkpoint.sampling_defaults, **override},
        checkpoint.device.type == "cuda",
        checkpoint.report.bitwise,
        "\n".join(banner),
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
    chat_template, chat_formats = chat_of(settings, tokenizer, served.vocab_size)
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


def metrics_of(factory: MetricFactory, plan: ServingPlan, put: Put | None = None) -> Metrics:
    """Build the metrics; with `put` they also report the end of each answer."""
    parts = factory, plan.context_bounds, plan.config, rejection_reasons(), plan.cache_parts
    return Metrics(*parts) if put is None else AnswerWatch(put, *parts)
