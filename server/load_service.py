"""Settings -> a service ready to start: the one place where the parts are put together."""

from dataclasses import replace
from pathlib import Path

import torch

from model_runtime.build_engine import build_engine, sized
from model_runtime.checkpoint import EMBEDDED_MODEL, Checkpoint, load_checkpoint
from model_runtime.config import EngineConfig
from model_runtime.deployment import Deployment
from model_runtime.make_deployment import make_deployment
from rope import RopeConfigError
from server.errors import rejection_reasons
from server.metrics import MetricFactory, Metrics, default_context_buckets
from server.service import Service
from server.settings import ServeSettings, SettingsError

EMBEDDED_NAME = "ropewalk-demo"
_EMBEDDED_FACTOR = 8.0  # trained on 256 tokens, and alive to 2,048


def load_service(settings: ServeSettings) -> tuple[Service, str]:
    """Load everything; returns the service and the banner's lines about it.

    Raises model_runtime's ModelError or SettingsError, with a sentence.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    checkpoint = load_checkpoint(
        settings.model or EMBEDDED_MODEL,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )
    try:
        deployment = _deployment(settings, checkpoint)
    except RopeConfigError as error:
        inside = "" if error.field in ServeSettings.model_fields else "rope_scaling: "
        raise SettingsError(f"{inside}{error}") from error
    config = _config(settings, checkpoint, deployment.max_len)
    bounds = _context_bounds(settings, deployment.native_len, config.max_model_len)
    applicable = sorted(
        {
            (tier.profile.scaling.rope_type, tier.factor)
            for tiers in deployment.tiers.values()
            for tier in tiers
        }
    )
    metrics = Metrics(
        MetricFactory(),
        bounds,
        config.num_pages,
        {deployment.name: applicable},
        rejection_reasons(),
    )
    service = Service(
        build_engine(checkpoint, config, metrics, [tier.profile for tier in deployment.own_tiers]),
        checkpoint.tokenizer,
        {deployment.name: deployment},
        metrics,
        checkpoint.vocab_size,
        checkpoint.sampling_defaults,
        config.max_model_len,
    )
    return service, _banner(checkpoint, deployment, config)


def _deployment(settings: ServeSettings, checkpoint: Checkpoint) -> Deployment:
    rope_scaling, name = settings.rope_scaling, settings.served_model_name
    if settings.model is None:
        name = name or EMBEDDED_NAME
        if rope_scaling is None and settings.rope_tiers is None:
            rope_scaling = {"rope_type": "yarn", "factor": _EMBEDDED_FACTOR}
    return make_deployment(
        name or Path(str(settings.model)).name,
        checkpoint.native,
        rope_scaling=rope_scaling,
        policy=settings.rope_policy,
        multiples=settings.rope_tiers,
        allowed_rope_types=settings.allowed_rope_types,
        max_rope_factor=settings.max_rope_factor,
        max_model_len=settings.max_model_len,
    )


def _config(settings: ServeSettings, checkpoint: Checkpoint, max_model_len: int) -> EngineConfig:
    config = EngineConfig(
        kv_cache_tokens=settings.kv_cache_tokens or 0,
        max_model_len=max_model_len,
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_logit_rows=settings.max_num_logit_rows,
        max_queued_requests=settings.max_queued_requests,
    )
    if settings.kv_cache_tokens is None:
        config = sized(config, checkpoint, settings.kv_cache_gib)
    capacity = config.num_pages * config.page_size
    if capacity == 0:
        raise SettingsError(f"the KV cache holds no page of {config.page_size} tokens, enlarge it")
    if settings.max_model_len is not None and settings.max_model_len > capacity:
        raise SettingsError(
            f"max_model_len must be <= what the KV cache holds ({capacity} tokens), got "
            f"{settings.max_model_len}"
        )
    return replace(config, max_model_len=min(max_model_len, capacity))


def _context_bounds(
    settings: ServeSettings, native_len: int, max_model_len: int
) -> tuple[int, ...]:
    if settings.context_buckets is None:
        return default_context_buckets(native_len, max_model_len)
    return settings.context_buckets


def _banner(checkpoint: Checkpoint, deployment: Deployment, config: EngineConfig) -> str:
    """What an operator should know before the first request."""
    capacity = config.num_pages * config.page_size
    longest = config.max_model_len
    limited = " (what the KV cache holds)" if longest < deployment.max_len else ""
    tiers = " ".join(f"{tier.ceiling}:{tier.factor:g}x" for tier in deployment.own_tiers)
    exact = "to the bit" if checkpoint.report.bitwise else "within rounding"
    where = f"{checkpoint.device}, {str(checkpoint.dtype).removeprefix('torch.')}"
    if checkpoint.device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    return "\n".join(
        [
            f"  model            {deployment.name} ({type(checkpoint.model).__name__}, {where})",
            f"  native length    {deployment.native_len} tokens",
            f"  scaling          {deployment.rope_type}, {deployment.policy}",
            f"  tiers            {tiers}",
            f"  longest context  {longest} tokens{limited}",
            f"  KV cache         {capacity} tokens in {config.num_pages} pages",
            f"  self-check       passed; answers are the same in any batch {exact}",
        ]
    )
