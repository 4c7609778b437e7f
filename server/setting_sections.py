"""The settings themselves, in sections: names, units, defaults, help, limits."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import NoDecode

from model_runtime.sampler import MAX_LOGPROBS
from rope import POLICIES, ROPE_TYPES, Policy
from server.metrics import MAX_CONTEXT_BUCKETS
from server.setting_types import FromJson, Integers, JsonObject, Names, Numbers, Section, setting


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


class HttpSettings(Section):
    """HTTP and metrics"""  # noqa: D400  # a heading

    host: str = setting("127.0.0.1", "Address to listen on.", unit="address")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", unit="port", ge=0, le=65535)
    sse_keep_alive_seconds: float = setting(
        15.0,
        "Silence in a stream before a comment keeps proxies from closing it; 0: never.",
        unit="seconds",
        ge=0,
        allow_inf_nan=False,
    )
    context_buckets: Integers | None = setting(
        None,
        "Upper bounds of the metrics' context_bucket label, at most 11. Left out: fractions and "
        "multiples of the trained length.",
        unit="tokens",
        max_length=MAX_CONTEXT_BUCKETS - 1,
    )


class AccessSettings(Section):
    """Access"""  # noqa: D400  # a heading

    api_key: Names = setting(
        (),
        "Keys, any of which a request must bear (`Authorization: Bearer KEY`). Without one, "
        "whoever reaches the port may ask.",
        unit="keys",
        repr=False,
    )
    api_key_file: Path | None = setting(None, "File with more keys, one a line.", unit="path")
    open_metrics: bool = setting(
        default=False, text="Answer /metrics without a key, too.", unit="switch"
    )
    ssl_certfile: Path | None = setting(
        None, "Certificate chain in PEM format: serve TLS.", unit="path"
    )
    ssl_keyfile: Path | None = setting(
        None, "Its private key. Left out: it stands in ssl_certfile.", unit="path"
    )
    allowed_origins: Names = setting(
        (),
        "Origins whose web pages may ask (CORS), as https://example.org; * is any. Credentials "
        "of a browser are never accepted.",
        unit="origins",
    )


class LimitSettings(Section):
    """Limits"""  # noqa: D400  # a heading

    max_body_bytes: int = setting(
        8 * 2**20, "A request's body; larger: 413.", unit="bytes", ge=1024
    )
    max_header_bytes: int = setting(
        65536, "A request's head in all; larger: 400.", unit="bytes", ge=1024
    )
    max_headers: int = setting(100, "Headers of a request; more: 431.", unit="headers", ge=1)
    max_json_depth: int = setting(
        64, "Nesting of a body; deeper: 400.", unit="levels", ge=4, le=500
    )
    max_connections: int = setting(
        1024,
        "Open connections; the one that has been idle longest makes room for a new one.",
        unit="connections",
        ge=1,
    )
    head_timeout_seconds: float = setting(
        20.0, "For a request's head to arrive; then the connection is closed.", unit="seconds", gt=0
    )
    body_timeout_seconds: float = setting(
        60.0, "For a request's body to arrive; later: 408.", unit="seconds", gt=0
    )
    send_timeout_seconds: float = setting(
        60.0,
        "For a client to take what was sent; then its request is aborted.",
        unit="seconds",
        gt=0,
    )
    max_unread_tokens: int = setting(
        16384,
        "Outputs that a stream's client may lag behind; then its request is aborted.",
        unit="tokens",
        ge=16,
    )
    max_prompts: int = setting(64, "Prompts in a request.", unit="prompts", ge=1, le=1024)
    max_n: int = setting(16, "Answers to a prompt (n, best_of).", unit="answers", ge=1, le=128)
    max_prompt_chars: int | None = setting(
        None,
        "A prompt before it is tokenised. Left out: what the longest context could have.",
        unit="characters",
        ge=1,
    )
    max_stop_strings: int = setting(4, "Stop strings of a request.", unit="strings", ge=0, le=64)
    max_stop_chars: int = setting(256, "Each of them.", unit="characters", ge=1, le=4096)
    max_stop_token_ids: int = setting(
        128, "stop_token_ids of a request.", unit="tokens", ge=0, le=4096
    )
    max_logit_bias: int = setting(1024, "Entries of logit_bias.", unit="tokens", ge=0, le=65536)
    max_logprobs: int = setting(
        20, "Alternatives to report for a token.", unit="tokens", ge=0, le=MAX_LOGPROBS
    )
    stall_seconds: float = setting(
        120.0,
        "A step may take so long; then /live, /ready and /health answer 503.",
        unit="seconds",
        gt=0,
    )
    shutdown_timeout_seconds: float = setting(
        30.0,
        "On SIGTERM, running requests may finish for so long; then they end with an error.",
        unit="seconds",
        ge=0,
    )


class GrammarSettings(Section):
    """Structured answers"""  # noqa: D400  # a heading

    max_schema_bytes: int = setting(
        65_536, "Largest JSON schema of a request's response_format.", unit="bytes", ge=2
    )
    grammar_compile_seconds: float = setting(
        5.0,
        "A schema that takes longer to compile is answered 400.",
        unit="seconds",
        ge=0.1,
        le=600,
        allow_inf_nan=False,
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
