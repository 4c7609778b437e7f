"""Settings for requests to the port: HTTP, access, request limits and grammars."""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Le
from pydantic import AfterValidator, Field
from pydantic_settings import NoDecode

from ropewalk.model_runtime.request import MAX_LOGPROBS
from ropewalk.model_runtime.text.grammar_trial import ONE_SPACE, checked_whitespace
from ropewalk.server.settings.fields import (
    MAX_CONTEXT_BUCKETS,
    FromJson,
    GenerationDefaults,
    HostNames,
    Integers,
    Keys,
    Names,
    OffIsAWord,
    Section,
    setting,
)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpSettings(Section):
    """HTTP and metrics"""  # noqa: D400  # a heading

    host: str = setting("127.0.0.1", "Address to listen on.", unit="address", min_length=1)
    port: int = setting(8000, "Port to listen on. 0 picks a free one.", unit="port", ge=0, le=65535)
    sse_keep_alive_seconds: float = setting(
        15.0,
        "Seconds of silence in a stream before a comment is sent to keep proxies from closing"
        " it. 0: never.",
        unit="seconds",
        ge=0,
        allow_inf_nan=False,
    )
    stream_interval: int = setting(
        1,
        "Tokens in an event of a stream. The first token is sent alone and at once, and the last "
        "with those that wait.",
        unit="tokens",
        ge=1,
        le=1024,
    )
    context_buckets: Integers | None = setting(
        None,
        "Upper bounds of the metrics' context_bucket label, at most 11. Default: fractions "
        "and multiples of the trained length.",
        unit="tokens",
        max_length=MAX_CONTEXT_BUCKETS - 1,
    )

    @property
    def is_on_loopback(self) -> bool:
        """Return whether only this machine reaches the port."""
        return is_loopback(self.host)


class KeyEntry(Section):
    """The bounds of the API keys of one name."""

    name: str = Field(min_length=1)
    max_running: int | None = Field(None, ge=1)
    max_requests_per_minute: int | None = Field(None, ge=1)


class AccessSettings(Section):
    """Access"""  # noqa: D400  # a heading

    api_key: Keys = setting(
        (),
        "Keys that requests may present as `Authorization: Bearer KEY`. Without a key the "
        "server answers every client that reaches the port.",
        unit="keys",
        repr=False,
    )
    api_key_file: Path | None = setting(
        None,
        "File with more keys, one a line, as `name:key` or `key`. A line that begins with # is a "
        "comment.",
        unit="path",
    )
    router_key: str | None = setting(
        None,
        "Key of the router in front (`ropewalk route`), which may then give answers their ids, and "
        "read models and metrics without an API key. Without it no router may.",
        unit="key",
        min_length=16,
        max_length=256,
        pattern=r"^[\x21-\x7e]+$",
        repr=False,
    )
    router_only: bool = setting(
        default=False,
        text="Refuse requests that do not come through that router. /health, /live, /ready and "
        "/version are open.",
        unit="switch",
    )
    keys: Annotated[tuple[KeyEntry, ...] | None, NoDecode, FromJson] = setting(
        None,
        "Bounds of named keys: a list of objects with a name and max_running or "
        "max_requests_per_minute. The keys themselves are in api_key_file.",
        unit="JSON",
    )
    share_prefixes: bool = setting(
        default=False,
        text="Let requests of API keys with different names share cached prefixes. Without it, "
        "cached_tokens tells a client about the prompts of its own name only.",
        unit="switch",
    )
    open_metrics: bool = setting(
        default=False, text="Answer /metrics without a key.", unit="switch"
    )
    playground: Literal["auto", "always", "never"] = setting(
        "auto",
        "When /playground/ serves a page to try the model in a browser. auto: if host is a "
        "loopback address.",
        unit="when",
    )
    ssl_certfile: Path | None = setting(
        None,
        "Certificate chain in PEM format. The server then speaks TLS.",
        unit="path",
        flags=("--ssl-cert-file",),
    )
    ssl_keyfile: Path | None = setting(
        None,
        "Private key of the certificate. Default: the key is in ssl_certfile.",
        unit="path",
        flags=("--ssl-key-file",),
    )
    allowed_origins: Names = setting(
        (),
        "Origins whose web pages may send requests (CORS), for example https://example.org. *"
        " allows any. Browser credentials are never accepted.",
        unit="origins",
    )
    allowed_hosts: HostNames = setting(
        (),
        "Host names that requests may have in their Host header, for example llm.example.org or "
        "*.example.org. Others get 403. Addresses and local names are always allowed, and * allows "
        "any. Default: none more if host is a loopback address and there is no key, else any.",
        unit="hosts",
    )
    access_log: Annotated[Literal["off", "requests", "all"], OffIsAWord] = setting(
        "requests",
        "Requests that have a line in the log: off, requests (those that generate) or all (without "
        "probes and /metrics).",
        unit="name",
    )


class LogSettings(Section):
    """Log and traces"""  # noqa: D400  # a heading

    log_format: Literal["logfmt", "json", "console"] = setting(
        "logfmt",
        "Format of the log on standard error: logfmt, json (every line is an object, the first "
        "ones too) or console (for people at a terminal).",
        unit="name",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info",
        "Least level of a line: debug, info, warning or error. Lines of the access log are info. "
        "At debug, uvicorn and transformers tell more than warnings.",
        unit="name",
        flags=("--uvicorn-log-level",),
    )
    traces: bool = setting(
        default=False,
        text="Send OpenTelemetry spans of requests, as the OTEL_* variables say. Needs the extra "
        "otel.",
        unit="switch",
    )


class LimitSettings(Section):
    """Limits"""  # noqa: D400  # a heading

    max_body_bytes: int | None = setting(
        None,
        "Largest request body. Larger bodies get 413, or 400 as prompts beyond the longest "
        "context. Default: 1 MiB, and 64 bytes for each token of that context.",
        unit="bytes",
        ge=1024,
    )
    max_total_body_bytes: int | None = setting(
        None,
        "Most bytes of all bodies above 32 KiB that arrive or wait to be parsed. Further ones get "
        "503. Default: 256 MiB, or four of the largest bodies if that is more.",
        unit="bytes",
        ge=1024,
    )
    max_header_bytes: int = setting(
        65536,
        "Largest request head, all headers together. Larger heads get 400.",
        unit="bytes",
        ge=1024,
    )
    max_json_depth: int = setting(
        64, "Deepest nesting of a JSON body. Deeper bodies get 400.", unit="levels", ge=4, le=400
    )
    max_json_values: int = setting(
        131_072,
        "Most names, texts, lists, objects, true, false and null in a JSON body. Bodies with more "
        "get 400. Numbers have a limit of their own: so many, and 4 for each token of the longest "
        "context.",
        unit="values",
        ge=1024,
    )
    max_connections: int = setting(
        1024,
        "Most open connections. While there are so many, every request gets 503.",
        unit="connections",
        ge=1,
    )
    body_timeout_seconds: float = setting(
        60.0, "Time for a request's body to arrive. Later bodies get 408.", unit="seconds", gt=0
    )
    max_request_seconds: float | None = setting(
        None,
        "Longest time of a request, and the default of its `max_time`. Default: no bound.",
        unit="seconds",
        gt=0,
        le=86_400,
    )
    max_unread_tokens: int = setting(
        16384,
        "Most tokens that the client of a stream may lag behind. Then its request is aborted.",
        unit="tokens",
        ge=16,
    )
    max_prompts: int = setting(64, "Most prompts in a request.", unit="prompts", ge=1, le=1024)
    max_n: int = setting(16, "Most answers to a prompt (n, best_of).", unit="answers", ge=1, le=128)
    max_prompt_chars: int | None = setting(
        None,
        "Longest prompt before tokenisation. Default: the most characters that the longest "
        "context can hold.",
        unit="characters",
        ge=1,
    )
    max_stop_strings: int = setting(
        64, "Most stop strings of a request.", unit="strings", ge=0, le=1024
    )
    max_stop_chars: int = setting(256, "Longest stop string.", unit="characters", ge=1, le=4096)
    max_stop_token_ids: int = setting(
        128, "Most stop_token_ids of a request.", unit="tokens", ge=0, le=4096
    )
    max_logit_bias: int = setting(
        1024, "Most entries of logit_bias.", unit="tokens", ge=0, le=65536
    )
    max_logprobs: int = setting(
        20, "Most alternatives to report for a token.", unit="tokens", ge=0, le=MAX_LOGPROBS
    )
    override_generation_config: GenerationDefaults = setting(
        None,
        "Defaults of requests, laid over those of the model's files: temperature, top_p, top_k, "
        "min_p and repetition_penalty; and max_new_tokens, which bounds all answers. Example: "
        '{"temperature": 0.6, "max_new_tokens": 512}.',
        unit="JSON",
    )
    stall_seconds: float = setting(
        120.0,
        "Longest step before /live, /ready and /health answer 503.",
        unit="seconds",
        gt=0,
    )
    shutdown_timeout_seconds: float = setting(
        30.0,
        "Time for running requests to finish after SIGTERM. Then they end with an error.",
        unit="seconds",
        ge=0,
    )


def largest(name: str) -> int:
    """Return the largest value of a limit, which is the bound in the schemas of bodies."""
    bounds = LimitSettings.model_fields[name].metadata
    return next(int(str(each.le)) for each in bounds if isinstance(each, Le))


class GrammarSettings(Section):
    """Structured answers"""  # noqa: D400  # a heading

    max_schema_bytes: int = setting(
        65_536, "Largest JSON schema in a request's response_format.", unit="bytes", ge=2
    )
    grammar_compile_seconds: float = setting(
        5.0,
        "Longest time to compile a schema. Slower schemas get 400.",
        unit="seconds",
        ge=0.1,
        le=600,
        allow_inf_nan=False,
    )
    max_parallel_tool_calls: int = setting(
        8, "Most tool calls in an answer.", unit="calls", ge=1, le=128
    )
    whitespace_pattern: Annotated[str, AfterValidator(checked_whitespace)] = setting(
        ONE_SPACE,
        "Whitespace that a structured answer may contain in one place, as a regular expression of "
        "spaces, tabs and line breaks. Empty: none. A request may set another.",
        unit="pattern",
    )


class ReplicaSettings(Section):
    """Replicas"""  # noqa: D400  # a heading

    replicas: int | None = setting(
        None,
        "Serve with this many servers on Ray Serve (extra `ray`), and a router in front. Default: "
        "one engine in this process, without Ray.",
        unit="servers",
        ge=1,
        le=1024,
    )
    max_replicas: int | None = setting(
        None,
        "Add servers up to this number while tokens wait, and remove them again. Default: "
        "`replicas`.",
        unit="servers",
        ge=1,
        le=1024,
    )
    ray_address: str | None = setting(
        None,
        "Ray cluster to join, as `ray start` prints it, or `auto`. Default: a cluster of this "
        "machine, which is started and stopped with the server.",
        unit="host:port",
        min_length=1,
    )
    routing: Literal["prefix", "least_loaded", "round_robin"] = setting(
        "prefix",
        "Choice of the server: prefix (least cost in tokens, cached prefixes counted), "
        "least_loaded (the same without prefixes) or round_robin.",
        unit="name",
    )
    routing_decode_weight: int = setting(
        32,
        "Cost of a running answer beside prompt tokens that wait, for the choice of the server.",
        unit="tokens",
        ge=0,
        le=1_000_000,
    )
    continue_attempts: int = setting(
        3,
        "How often a request whose server is lost is sent again to another. Bytes that were sent "
        "are compared and skipped. 0: such a request gets an error.",
        unit="attempts",
        ge=0,
        le=100,
    )
    replica_wait_seconds: float = setting(
        60.0,
        "How long a POST waits for a server, if there is none.",
        unit="seconds",
        gt=0,
        le=86_400,
    )
    replica_silence_seconds: float = setting(
        10.0,
        "A server that neither sends tokens nor answers /ready for this long is lost.",
        unit="seconds",
        ge=2,
        le=86_400,
    )
