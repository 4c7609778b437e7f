"""The settings themselves, in sections: names, units, defaults, help, limits."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import NoDecode

from rope import POLICIES, ROPE_TYPES, Policy
from server.settings.fields import (
    FromJson,
    JsonObject,
    Names,
    Numbers,
    Section,
    setting,
)
from server.settings.request_sections import (
    AccessSettings,
    GrammarSettings,
    HttpSettings,
    LimitSettings,
)


class ModelSettings(Section):
    """Model"""  # noqa: D400  # a heading

    model: str | None = setting(
        None,
        "Model folder or hub id. Left out: the embedded demonstration model.",
        unit="path or id",
        min_length=1,
    )
    served_model_name: str | None = setting(
        None,
        "The name clients use. Left out: the folder's or the hub id's last part.",
        unit="name",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Number type of weights and cache: auto, float32, bfloat16 or float16; auto is float32 on "
        "a CPU, else the checkpoint's.",
        unit="name",
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda or cuda:N.",
        unit="name",
        pattern="^(auto|cpu|cuda(:[0-9]+)?)$",
    )
    threads: int | None = setting(
        None,
        "CPU threads for computing. Left out: torch's choice.",
        unit="threads",
        ge=1,
        le=512,
    )
    trust_remote_code: bool = setting(
        default=False,
        text="Run Python code that comes with the checkpoint.",
        unit="switch",
    )
    chat_template: Path | None = setting(
        None,
        "Jinja file that turns messages into a prompt. Left out: the tokenizer's own, or a plain "
        "transcript where it has none.",
        unit="path",
    )
    allowed_chat_template_kwargs: Names = setting(
        ("enable_thinking", "thinking", "reasoning_effort"),
        "Variables of the chat template that requests may set.",
        unit="names",
    )


class DeploymentSettings(Section):
    """Deployment"""  # noqa: D400  # a heading

    rope_scaling: JsonObject | None = setting(
        None,
        "Hugging Face's rope block: how to rescale beyond the trained length. Left out: "
        '{"rope_type": "yarn", "factor": 4.0}, or the checkpoint\'s own block.',
        unit="JSON",
    )
    rope_policy: Policy | None = setting(
        None,
        f"What decides a request's tier: one of {', '.join(POLICIES)}. Left out: pinned, or fixed "
        "for a checkpoint that carries scaling.",
        unit="name",
    )
    rope_tiers: Numbers | None = setting(
        None,
        "Tier ceilings as multiples of the trained length, rising from 1 to the factor, as "
        "1,2,4,8. Left out: powers of two up to the factor.",
        unit="multiples",
    )
    allowed_rope_types: Names | None = setting(
        None,
        f"Methods that a request may ask for: any of {','.join(ROPE_TYPES)}. Left out: all that "
        "the model can use.",
        unit="names",
    )
    max_rope_factor: float | None = setting(
        None,
        "Largest factor that a request may ask for. Left out: the longest tier's.",
        unit="factor",
        ge=1,
        allow_inf_nan=False,
    )
    max_model_len: int | None = setting(
        None,
        "Longest context. Left out: the longest tier, or what the cache holds if that is less. "
        "Larger than the cache: refuses to start.",
        unit="tokens",
        ge=1,
    )
    answer_reserve_tokens: int | None = setting(
        None,
        "Room for an answer whose chat request names no max_tokens: its tier covers the prompt "
        "and this. Left out: an eighth of the trained length.",
        unit="tokens",
        ge=1,
    )


class DeploymentEntry(DeploymentSettings):
    """One of several served names."""

    name: str = Field(min_length=1)


class CacheSettings(Section):
    """Cache and scheduling"""  # noqa: D400  # a heading

    kv_cache_gib: float | None = setting(
        None,
        "Size of the KV cache. Left out: a quarter of the memory (on a GPU: what "
        "gpu_memory_utilization leaves), but no more than max_num_seqs longest contexts.",
        unit="GiB",
        gt=0,
        allow_inf_nan=False,
    )
    kv_cache_tokens: int | None = setting(
        None, "Size of the KV cache, instead of kv_cache_gib.", unit="tokens", ge=1
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Of a GPU's memory, what all on it may take where the cache's size is left out: a step "
        "as large as the limits allow is run at start, the cache gets the rest. Not for a CPU.",
        unit="share",
        gt=0,
        le=1,
    )
    page_size: int = setting(64, "A page of the KV cache.", unit="tokens", ge=4, le=256)
    max_num_seqs: int = setting(32, "Sequences served at once.", unit="sequences", ge=1, le=4096)
    enforce_eager: bool = setting(
        default=False,
        text="On a GPU decode steps are recorded at start, by number of sequences (CUDA graphs). "
        "This leaves it out: a sooner start, slower decoding. On a CPU nothing is recorded.",
        unit="switch",
    )
    max_num_batched_tokens: int = setting(
        2048,
        "Most that is computed in one step: one token for each sequence that decodes, the rest "
        "for chunks of prompts.",
        unit="tokens",
        ge=1,
    )
    step_target_seconds: float = setting(
        0.1,
        "What a step should take that reads prompts, within a factor of 1.4: how long an answer "
        "pauses for them, and a new request waits; four times that while no answer is written. "
        "Chunks follow what the last steps took. 0: as large as max_num_batched_tokens allows.",
        unit="seconds",
        ge=0,
    )
    max_num_logit_rows: int = setting(
        256,
        "Prompt positions in one step whose logprobs were asked for; bounds memory.",
        unit="positions",
        ge=1,
    )
    max_queued_requests: int = setting(
        256,
        "Requests that may wait for a place; one more is answered 429.",
        unit="requests",
        ge=0,
    )
    max_queued_prompt_tokens: int | None = setting(
        None,
        "Prompt tokens of all that wait; more are answered 429. Left out: max_queued_requests "
        "decides alone.",
        unit="tokens",
        ge=1,
    )


class SourceSettings(Section):
    """Configuration"""  # noqa: D400  # a heading

    config: Path | None = setting(
        None,
        "YAML file of settings, by their names with underscores. Not a setting of the file itself.",
        unit="path",
    )
    deployments: Annotated[tuple[DeploymentEntry, ...], NoDecode, FromJson] | None = setting(
        None,
        "Several names over one set of weights and one cache: a list of objects with a name and "
        "the settings under Deployment.",
        unit="JSON",
        min_length=1,
        max_length=16,
    )


# In the order of help and docs/settings.md.
SECTIONS: tuple[type[Section], ...] = (
    SourceSettings,
    ModelSettings,
    DeploymentSettings,
    CacheSettings,
    HttpSettings,
    AccessSettings,
    LimitSettings,
    GrammarSettings,
)
