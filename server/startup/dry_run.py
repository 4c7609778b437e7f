"""The serving plan that `config check` prints, made without loading weights."""

from dataclasses import dataclass

from model_runtime.cache.token_bytes import bytes_per_token
from model_runtime.engine.cache_size import affordable_bytes, total_memory
from model_runtime.loading.checkpoint import EMBEDDED_MODEL, expected_products
from model_runtime.loading.model_config import ModelConfig, read_model_config
from model_runtime.loading.pretrained import load_tokenizer
from server.settings.load import ServeSettings, SettingsError
from server.startup.load_service import chat_template_of, computing_line
from server.startup.serving_plan import ModelFacts, ServingPlan, describe, plan_serving, size_text


@dataclass(frozen=True, slots=True)
class Outlook:
    """A serving plan for a model that has not been loaded."""

    outline: ModelConfig
    plan: ServingPlan
    num_weight_bytes: int | None  # None: a hub id; its weights are not looked up


def outline_of(settings: ServeSettings) -> ModelConfig:
    """Read the config of the settings' model, or of the embedded one. Raises ModelError."""
    return read_model_config(
        settings.model or EMBEDDED_MODEL,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def outlook_of(settings: ServeSettings) -> Outlook:
    """Read the model's config and tokenizer, and plan. Raises ModelError or SettingsError.

    The architecture is not checked, because only loading shows whether it is supported.
    """
    outline = outline_of(settings)
    tokenizer = load_tokenizer(outline.source, trust_remote_code=settings.trust_remote_code)
    chat_template_of(settings, tokenizer)
    num_weight_bytes = outline.num_weight_bytes()
    facts = ModelFacts(
        outline.native(),
        bytes_per_token(outline.layers(), outline.dtype),
        affordable_bytes(outline.device, settings.gpu_memory_utilization, num_weight_bytes or 0),
    )
    plan = plan_serving(settings, facts)
    if outline.device.type == "cpu":
        needed = plan.cache_bytes + (num_weight_bytes or 0)
        if needed > total_memory():
            raise SettingsError(
                f"weights and KV cache need {size_text(needed)}, this machine has "
                f"{size_text(total_memory())}"
            )
    return Outlook(outline, plan, num_weight_bytes)


def outlook_lines(settings: ServeSettings, outlook: Outlook) -> list[str]:
    """Return the banner lines of `serve`, with the memory that it would take."""
    outline, plan = outlook.outline, outlook.plan
    dtype = str(outline.dtype).removeprefix("torch.")
    weights = "weights not counted (they are not on this machine)"
    if outlook.num_weight_bytes is not None:
        weights = f"{size_text(outlook.num_weight_bytes)} weights"
    memory = f"{weights}, {size_text(plan.cache_bytes)} cache"
    if outline.device.type == "cpu":
        memory += f", of {size_text(total_memory())}"
    elif settings.kv_cache_gib is None and settings.kv_cache_tokens is None:
        memory += " (estimated: `serve` runs a step of the model and sizes the cache by that)"
    return [
        f"  model            {settings.model or 'the embedded one'}: {outline.architecture}, "
        f"{outline.device}, {dtype}",
        *describe(plan),
        computing_line(
            expected_products(outline.device, outline.dtype), outline.device, "the self-check tells"
        ),
        f"  memory           {memory}",
        f"  would listen on  {settings.host}, port {settings.port}",
        "  not checked      whether the address is free, and whether the architecture can be taken "
        "over: loading it shows",
    ]
