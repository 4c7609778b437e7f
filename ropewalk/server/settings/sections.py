"""Settings in sections, with names, units, defaults, help and limits."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions
from ropewalk.model_runtime.setting import setting
from ropewalk.server.settings.fields import (
    Device,
    Names,
    Section,
    StoreAddress,
    other_words,
)


class ModelSettings(Section):
    """Model"""  # noqa: D400  # a heading

    model: str | None = setting(
        None,
        "Model folder, GGUF file or hub id. Default: the embedded demonstration model.",
        unit="path or id",
        flags=("--model", "--model-path", "-m"),
        min_length=1,
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a hub id. Default: its default branch. Refused for a folder.",
        unit="name",
        min_length=1,
    )
    gguf_file: str | None = setting(
        None,
        "Name of the GGUF file in the model folder, if the folder has several or other weights.",
        unit="name",
        min_length=1,
    )
    served_model_name: str | None = setting(
        None,
        "Model name that clients send. Default: the last part of the folder or hub id, or the name "
        "of the GGUF file.",
        unit="name",
        flags=("--alias", "-a"),
        min_length=1,
    )
    model_aliases: dict[str, str] | None = setting(
        None,
        'Other names that clients may send, each with the deployment that serves it: {"gpt-4o": '
        '"my-model"}.',
        unit="JSON",
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        other_words(half="float16", float="float32"),
    ] = setting(
        "auto",
        "Number type of weights and KV cache: auto, float32 (or float), bfloat16, or float16 (or "
        "half). auto is float32 on a CPU and the checkpoint's own type elsewhere.",
        unit="name",
    )
    weights: Literal["stored", "int8", "dequantised"] = setting(
        "stored",
        "Storage of weights: stored keeps a GGUF file quantised, and on a GPU any quantised "
        "checkpoint; int8 quantises any checkpoint at load, on a CPU; dequantised makes numbers of "
        "--dtype.",
        unit="name",
    )
    activations: Literal["auto", "exact", "int8", "fp8"] = setting(
        "auto",
        "Activations of products with quantised weights: exact, int8 (rounded to eight bits, on a "
        "CPU) or fp8 (on a GPU, for weights in FP8). auto is int8 for a quantised GGUF file on "
        "a CPU with VNNI instructions, and else exact.",
        unit="name",
    )
    device: Device = setting(
        "auto", "Device to compute on: auto, cpu, cuda or cuda:N.", unit="name"
    )
    threads: int | None = setting(
        None,
        "CPU threads to compute with. Default: torch's choice.",
        unit="threads",
        flags=("-t",),
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
        "Jinja file that turns messages into a prompt. Default: the tokenizer's own template,"
        " or a plain transcript if it has none.",
        unit="path",
        flags=("--chat-template-file",),
    )
    allowed_chat_template_kwargs: Names = setting(
        ("enable_thinking", "thinking", "reasoning_effort"),
        "Variables of the chat template that requests may set.",
        unit="names",
    )
    tool_format: Literal[
        "auto", "none", "hermes", "mistral", "llama-json", "qwen3-coder", "pythonic", "generic"
    ] = setting(
        "auto",
        "Format of the model's tool calls: a name, auto or none. auto is the format of the chat "
        "template, or else generic, whose instructions the server adds. With none, requests with "
        "tools get 400.",
        unit="name",
    )
    reasoning: Literal["split", "inline"] = setting(
        "split",
        "Place of the model's reasoning in chat answers: split is a field of its own, inline is "
        "the content.",
        unit="name",
    )


class DeploymentSettings(DeploymentOptions, Section):
    """Deployment"""  # noqa: D400  # a heading


class DeploymentEntry(DeploymentSettings):
    """One of several served names."""

    name: str = Field(min_length=1)


class CacheSettings(Section):
    """Cache and scheduling"""  # noqa: D400  # a heading

    kv_cache_gib: float | None = setting(
        None,
        "Size of the KV cache. Default: a quarter of the free memory, or on a GPU the rest of "
        "gpu_memory_utilization, but never more than max_num_seqs of the longest contexts "
        "need.",
        unit="GiB",
        gt=0,
    )
    kv_cache_tokens: int | None = setting(
        None,
        "Size of the KV cache in tokens, instead of kv_cache_gib.",
        unit="tokens",
        flags=("--max-total-tokens",),
        ge=1,
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fixed8", "int8", "k8v4", "int4"] = setting(
        "auto",
        "Number type of the KV cache. auto is --dtype. fixed8 has eight bits, also on a GPU. On a "
        "CPU there are bfloat16 for a model in float32, int8, k8v4 (keys in eight bits, values in "
        "four) and int4. All change answers a little.",
        unit="name",
    )
    kv_disk: Path | None = setting(
        None,
        "Folder for cached prefixes, which outlive a restart. Several servers may share it. "
        "Anyone who reads it can reconstruct prompts, so its mode must be 0700. On a GPU it needs "
        "kv_offload_gib. Default: prefixes are in memory only.",
        unit="path",
    )
    kv_disk_gib: float | None = setting(
        None,
        "Size of that folder, required with it. The least recently used pages are deleted.",
        unit="GiB",
        gt=0,
    )
    kv_store: StoreAddress | None = setting(
        None,
        "Network store of cached prefixes in place of a folder: Valkey, or a server of its "
        "protocol. valkeys:// is TLS. Anyone who reads it can reconstruct prompts. Needs the "
        "package valkey, and on a GPU kv_offload_gib. Default: none.",
        unit="valkey://HOST:PORT",
        repr=False,  # it may have a password
    )
    kv_offload_gib: float | None = setting(
        None,
        "Host memory of a GPU server for cached prefixes, before the folder or the store if there "
        "is one. Default: none.",
        unit="GiB",
        gt=0,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Fraction of GPU memory that the server may use, other processes included. The server"
        " measures its largest step at start and gives the rest to the cache. Ignored if the "
        "cache size is set, and on a CPU.",
        unit="share",
        gt=0,
        le=1,
    )
    page_size: int = setting(
        64,
        "Tokens in a page of the KV cache.",
        unit="tokens",
        flags=("--block-size",),
        ge=4,
        le=256,
    )
    max_num_seqs: int | None = setting(
        None,
        "Sequences served at the same time (concurrency). Default: 32; on a GPU 256, or 128 below "
        "40 GiB.",
        unit="sequences",
        flags=("--max-running-requests", "--parallel", "-np"),
        ge=1,
        le=4096,
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs",
        "Order in which requests start: fcfs is that of their arrival, priority that of their "
        "`priority` (a lower number first), then of their arrival.",
        unit="name",
    )
    enforce_eager: bool = setting(
        default=False,
        text="Do not capture CUDA graphs of decode steps. The server starts sooner and decodes "
        "more slowly. No effect on a CPU.",
        unit="switch",
        flags=("--disable-cuda-graph",),
    )
    exact_batches: bool = setting(
        default=False,
        text="On a GPU, give an answer the same tokens and logprobs in any batch, to the bit. "
        "Steps take longer. No effect on a CPU, whose banner says whether that is so. "
        "VLLM_BATCH_INVARIANT=1 sets it, too.",
        unit="switch",
        flags=("--enable-deterministic-inference",),
    )
    max_draft_tokens: int | None = setting(
        None,
        "Most draft tokens of a sequence in a decode step (speculative decoding). 0: no "
        "speculation. Default: 15 with batch invariance, as on a CPU or with exact_batches, else "
        "0. Without batch invariance, the bits of an answer may depend on drafts.",
        unit="tokens",
        ge=0,
        le=15,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens of one step. Each decoding sequence takes one; chunked prefill takes the "
        "rest. Default: 2048; on a GPU of 70 GiB and more 8192.",
        unit="tokens",
        ge=1,
    )
    step_target_seconds: float | None = setting(
        None,
        "Target duration of a step that includes prefill. It bounds how long running requests "
        "pause. Steps may exceed it by up to 1.4x. While nothing is decoding, the target is four "
        "times as long. Default: 0.1, or 0.25 on a GPU; more where four steps without prefill take "
        "longer than that. 0: no target.",
        unit="seconds",
        ge=0,
    )
    max_queued_requests: int = setting(
        256,
        "Length of the request queue. Further requests get 429.",
        unit="requests",
        ge=0,
    )
    max_queued_prompt_tokens: int | None = setting(
        None,
        "Prompt tokens in the request queue. Further requests get 429. Default: no limit "
        "beside max_queued_requests.",
        unit="tokens",
        ge=1,
    )


class ParallelSettings(Section):
    """Tensor parallelism"""  # noqa: D400  # a heading

    tensor_parallel_size: int = setting(
        1,
        "Processes on this machine, each with a part of every layer and of the KV cache. On GPUs "
        "each has a GPU. The number must divide the model's heads.",
        unit="processes",
        flags=("--tp-size", "--tp", "-tp"),
        ge=1,
        le=64,
    )


_MAX_DEPLOYMENTS = 16
Entries = tuple[DeploymentEntry, ...]


def _one_to_sixteen(entries: Entries | None) -> Entries | None:
    # Field's own limits would also count an entry that is wrong as missing.
    if entries is not None and not entries:
        raise ValueError("must have at least 1 item")
    if entries is not None and len(entries) > _MAX_DEPLOYMENTS:
        raise ValueError(f"must have at most {_MAX_DEPLOYMENTS} items")
    return entries


class SourceSettings(Section):
    """Configuration"""  # noqa: D400  # a heading

    config: Path | None = setting(
        None,
        "YAML file of settings, with underscores in their names. This setting cannot be in "
        "the file.",
        unit="path",
    )
    deployments: Annotated[Entries | None, AfterValidator(_one_to_sixteen)] = setting(
        None,
        "Several model names over one set of weights and one cache: a list of objects with a "
        "name and the settings under Deployment.",
        unit="JSON",
    )
