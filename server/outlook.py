"""What would be served, without loading weights: for `config check` and `inspect`."""

from dataclasses import dataclass

from model_runtime.build_engine import affordable_bytes, total_memory
from model_runtime.checkpoint import EMBEDDED_MODEL
from model_runtime.kv_store import bytes_per_token
from model_runtime.outline import Outline, read_outline
from server.serving_plan import ModelFacts, ServingPlan, describe, plan_serving
from server.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan over a model that has not been loaded."""

    outline: Outline
    facts: ModelFacts
    plan: ServingPlan
    num_weight_bytes: int | None  # None: a hub id, whose weights were not looked up


def outlook_of(settings: ServeSettings) -> Outlook:
    """Read the model's config and plan. Raises ModelError or SettingsError.

    The architecture is not checked: only loading it shows whether it can be taken over.
    """
    outline = read_outline(
        settings.model or EMBEDDED_MODEL,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )
    num_weight_bytes = outline.num_weight_bytes()
    facts = ModelFacts(
        outline.native(),
        bytes_per_token(outline.layers(), outline.dtype),
        affordable_bytes(outline.device, num_weight_bytes or 0),
    )
    return Outlook(outline, facts, plan_serving(settings, facts), num_weight_bytes)


def outlook_lines(settings: ServeSettings, outlook: Outlook) -> list[str]:
    """As the banner of `serve`, with the memory it will take."""
    outline, plan = outlook.outline, outlook.plan
    dtype = str(outline.dtype).removeprefix("torch.")
    cache_bytes = plan.config.kv_cache_tokens * plan.token_bytes
    weights = "unknown until loaded"
    if outlook.num_weight_bytes is not None:
        weights = size_text(outlook.num_weight_bytes)
    memory = f"{weights} weights, {size_text(cache_bytes)} cache"
    if outline.device.type == "cpu":
        memory += f", of {size_text(total_memory())}"
    return [
        f"  model            {settings.model or 'the embedded one'}: {outline.architecture}, "
        f"{outline.device}, {dtype}",
        *describe(plan),
        f"  memory           {memory}",
        f"  would listen on  {settings.host}, port {settings.port}",
        "  not checked      whether the architecture can be taken over: loading it shows",
    ]


def size_text(num_bytes: int) -> str:
    """Bytes in the unit that fits: 1.5 GiB, 14 MiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"
