"""The measured model, loaded as in `serve`, with a deployment for each variant."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.rope import NativeRope
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.load_model import load_model
from ropewalk.server.startup.planning.dry_run import outline_of
from ropewalk.server.startup.planning.model_facts import facts_of
from ropewalk.server.startup.planning.planned_deployments import model_name, profiles_of
from ropewalk.server.startup.planning.serving_plan import ServingPlan, plan_serving
from ropewalk.studies.evaluation.cells import TOGETHER
from ropewalk.studies.evaluation.model_digest import model_digest
from ropewalk.studies.evaluation.plan import EvalError, LengthPlan, Variant


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model, its engine once that is made, and its deployments."""

    name: str
    digest: str  # different if its answers may differ
    dtype: str
    device: str
    kv_cache_dtype: str
    tokenizer: Tokenizer
    make_engine: Callable[[], Engine]  # takes the memory of the cache
    deployments: Mapping[Variant, Deployment]


def native_of(settings: ServeSettings) -> NativeRope:
    """Return the model's own tables without loading weights. Raises ModelError."""
    return outline_of(settings).native()


def load_subject(settings: ServeSettings, plan: LengthPlan) -> Subject:
    """Load the settings' model, or the embedded one.

    Raises ModelError, SettingsError, or EvalError if the cache cannot hold the longest context.
    """
    checkpoint = load_model(settings)
    serving = plan_variants(plan, settings, checkpoint)
    profiles = profiles_of(serving.deployments)
    return Subject(
        model_name(settings),
        model_digest(checkpoint, settings.kv_cache_dtype, settings.page_size),
        str(checkpoint.dtype).removeprefix("torch."),
        str(checkpoint.device),
        settings.kv_cache_dtype,
        checkpoint.tokenizer,
        partial(build_engine, checkpoint, serving.config, profiles=profiles),
        dict(zip(plan.variants, serving.deployments, strict=True)),
    )


def plan_variants(plan: LengthPlan, settings: ServeSettings, checkpoint: Checkpoint) -> ServingPlan:
    """Plan a deployment per variant over one cache, in their order, as `serve` does.

    Raises SettingsError, or EvalError if the cache cannot hold the longest context.
    """
    entries = tuple(plan.entry(each) for each in plan.variants)
    changes: dict[str, object] = {"deployments": entries, "max_num_seqs": TOGETHER}
    if settings.max_num_batched_tokens is not None:
        changes["max_num_batched_tokens"] = max(settings.max_num_batched_tokens, TOGETHER)
    own = settings.model_copy(update=changes)
    serving = plan_serving(own, facts_of(checkpoint, own))
    longest = serving.config.longest_context
    if longest < plan.longest:
        raise EvalError(
            f"--context-lens must be <= {longest} tokens, which is the size of the KV "
            f"cache (kv_cache_gib, kv_cache_tokens), got {plan.longest}"
        )
    return serving
