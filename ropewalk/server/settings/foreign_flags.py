"""Flags of vLLM, SGLang and llama.cpp: those that mean a setting of ours, and why others are none.

Sources: vLLM's `vllm serve --help`, SGLang's docs/advanced_features/server_arguments.md, and
llama.cpp's tools/server/README.md.
"""

from collections.abc import Mapping

# A setting of ours (`model` is the argument MODEL) -> flags of the same meaning.
_SAME: Mapping[str, tuple[str, ...]] = {
    "model": ("--model", "--model-path", "-m"),
    "served_model_name": ("--alias", "-a"),
    "chat_template": ("--chat-template-file",),
    "threads": ("-t",),
    "max_model_len": ("--context-length", "--ctx-size", "-c"),
    "max_num_seqs": ("--max-running-requests", "--parallel", "-np"),
    "kv_cache_tokens": ("--max-total-tokens",),
    "page_size": ("--block-size",),
    "enforce_eager": ("--disable-cuda-graph",),
    "tensor_parallel_size": ("--tp-size", "--tp", "-tp"),
    "log_level": ("--uvicorn-log-level",),
    "ssl_certfile": ("--ssl-cert-file",),
    "ssl_keyfile": ("--ssl-key-file",),
}

# A sentence, the way of this server -> flags without a counterpart.
_REFUSED: Mapping[str, tuple[str, ...]] = {
    "MODEL may be a hub id with safetensors, as in `ropewalk serve OWNER/NAME`; download a GGUF "
    "file, and name the file.": ("--hf-repo", "-hf", "-hfr", "--hf-file", "-hff"),
    "The hub's token is the variable HF_TOKEN.": ("--hf-token", "-hft"),
    "Downloads are in the folder that HF_HOME names.": ("--download-dir",),
    "The tokenizer is that of MODEL.": (
        *("--tokenizer", "--tokenizer-path", "--tokenizer-mode", "--tokenizer-revision"),
        "--skip-tokenizer-init",
    ),
    "The format of the weights is found in their files.": ("--load-format",),
    "Quantised weights are found in their files; --weights int8 quantises others on a CPU.": (
        *("--quantization", "-q"),
    ),
    "--kv-cache-dtype sets the numbers of keys and values together, in formats of our own.": (
        *("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
    ),
    "Change a field in the model's config.json; --rope-scaling sets the rotation.": (
        *("--hf-overrides", "--override-kv"),
    ),
    'Rotation is set by --rope-scaling \'{"rope_type": "yarn", "factor": 4.0}\'; the base stays '
    "the trained one.": (
        *("--rope-theta", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"),
        *("--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow"),
        "--yarn-beta-fast",
    ),
    "The model's generation_config.json sets the defaults of sampling. "
    "--override-generation-config '{\"temperature\": 0.6}' lays others over it.": (
        *("--generation-config", "--temp", "--temperature"),
        *("--top-k", "--top-p", "--min-p", "--repeat-penalty"),
    ),
    "A request sets `max_tokens`. --override-generation-config '{\"max_new_tokens\": 512}' bounds "
    "it.": (*("--predict", "--n-predict", "-n", "--max-tokens", "--max-new-tokens"),),
    "A request sets `chat_template_kwargs`; --allowed-chat-template-kwargs says which.": (
        *("--chat-template-kwargs", "--default-chat-template-kwargs"),
    ),
    "A request sets `seed`; without one it gets a random seed.": ("--seed", "-s", "--random-seed"),
    "Prefix caching is always on.": (
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--disable-radix-cache"),
        *("--cache-prompt", "--no-cache-prompt", "--cache-reuse"),
    ),
    "Prompts are always computed in chunks; --step-target-seconds and --max-num-batched-tokens "
    "bound them.": (
        *("--enable-chunked-prefill", "--no-enable-chunked-prefill", "--chunked-prefill-size"),
        *("--max-prefill-tokens", "--batch-size", "-b", "--ubatch-size", "-ub"),
    ),
    "Requests always join the running batch.": (
        *("--cont-batching", "-cb", "--no-cont-batching", "-nocb"),
    ),
    "Set --scheduling-policy to fcfs or priority.": ("--schedule-policy",),
    "A preempted request is computed again, and weights stay on one device.": (
        *("--swap-space", "--cpu-offload-gb"),
    ),
    "Set --gpu-memory-utilization; it counts the memory of a step, too.": (
        "--mem-fraction-static",
    ),
    "--kv-disk and --kv-disk-gib keep pages of prefixes on disk, and --kv-store in Valkey. On a "
    "GPU --kv-offload-gib keeps them in host memory.": (
        *("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend"),
        *("--enable-hierarchical-cache", "--hicache-size", "--hicache-ratio"),
        *("--hicache-storage-backend", "--slot-save-path"),
    ),
    "Set --kv-cache-tokens or --kv-cache-gib.": (
        *("--num-gpu-blocks-override", "--kv-cache-memory-bytes"),
    ),
    "All layers are on the device that --device names.": ("--n-gpu-layers", "--gpu-layers", "-ngl"),
    "The kernels are chosen by the device.": (
        *("--attention-backend", "--flash-attn", "-fa", "--sampling-backend"),
    ),
    "Drafts need no second model; --max-draft-tokens bounds them.": (
        *("--speculative-config", "--speculative-model", "--num-speculative-tokens"),
        *("--speculative-algorithm", "--speculative-draft-model-path", "--model-draft", "-md"),
    ),
    "Tools are always accepted, and the format of calls is found in the chat template; "
    "--tool-format names another.": ("--enable-auto-tool-choice", "--tool-call-parser"),
    "Reasoning is found by the chat template's marker; --reasoning inline leaves it in the "
    "content.": ("--reasoning-parser", "--enable-reasoning", "--reasoning-format"),
    "Chat templates are always Jinja's.": ("--jinja", "--chat-template-content-format"),
    "Grammars are always held by llguidance.": (
        *("--guided-decoding-backend", "--grammar-backend"),
    ),
    "Adapters are not served; merge the adapter into the weights.": (
        *("--enable-lora", "--lora-modules", "--lora-paths", "--max-loras", "--max-lora-rank"),
        "--lora",
    ),
    "Text only: there are no images, no embeddings and no scores of pairs.": (
        *("--limit-mm-per-prompt", "--mmproj", "--task", "--runner", "--is-embedding"),
        *("--embedding", "--embeddings", "--reranking"),
    ),
    "One machine holds the model, by --tensor-parallel-size; --replicas serves with several "
    "engines.": (
        *("--pipeline-parallel-size", "-pp", "--pp-size", "--data-parallel-size", "-dp"),
        *("--dp-size", "--dp", "--nnodes", "--distributed-executor-backend"),
    ),
    "Routes have no prefix; the proxy in front removes it.": ("--root-path", "--fastapi-root-path"),
    "--access-log off leaves requests out of the log.": (
        *("--disable-log-requests", "--no-enable-log-requests", "--disable-uvicorn-access-log"),
    ),
    "The log has a line for each request; --access-log chooses which.": (
        *("--enable-log-requests", "--log-requests"),
    ),
    "--log-level debug tells more.": ("--verbose", "--log-verbosity"),
    "--traces sends spans; OTEL_EXPORTER_OTLP_ENDPOINT and the other OTEL_* variables say where.": (
        *("--otlp-traces-endpoint", "--collect-detailed-traces", "--enable-trace"),
    ),
    "Numbers are at /metrics, always and not in the log.": (
        *("--disable-log-stats", "--enable-metrics", "--metrics"),
    ),
    "--playground never leaves the page out.": ("--no-webui", "--no-ui"),
}

# foreign flag -> our setting
ALIASES = {flag: name for name, flags in _SAME.items() for flag in flags}
# foreign flag -> sentence
REFUSED = {flag: sentence for sentence, flags in _REFUSED.items() for flag in flags}
