"""`python benchmarks/peer_kv_cache.py FILE.gguf IDS ROWS`: `kv_cache.py`'s losses by llama.cpp.

It runs in an environment that has llama-cpp-python and numpy, and imports nothing of this project.
IDS is what `python -m benchmarks.kv_cache --ids IDS` has written: the tokens of the text, and the
one after them. Each cache type of keys and values is compared with f32, both with flash attention,
which quantised values need.

Shapes: R = scored rows, V = vocabulary.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp as api  # type: ignore[import-not-found]  # of another environment
import numpy as np

_CHUNK = 512
_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}  # numbers of ggml


def logprobs_of(path: Path, token_ids: list[int], num_rows: int, kind: int) -> Any:
    """Return the logprobs of the last rows, float32 [R, V]."""
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(token_ids) + 64, _CHUNK, _CHUNK
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = kind
    params.flash_attn_type = 1
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(_CHUNK, 0, 1)
    width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    found = []
    for first in range(0, len(token_ids), _CHUNK):
        chunk = token_ids[first : first + _CHUNK]
        batch.n_tokens = len(chunk)
        for at, token in enumerate(chunk):
            batch.token[at], batch.pos[at] = token, first + at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            is_scored = first + at >= len(token_ids) - num_rows
            batch.logits[at] = ctypes.c_int8(is_scored).value
        if api.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        for at in range(len(chunk)):
            if batch.logits[at]:
                row = api.llama_get_logits_ith(context, at)
                found.append(np.ctypeslib.as_array(row, (width,)).copy())
    api.llama_free(context)
    api.llama_model_free(model)
    logits_RV = np.stack(found).astype(np.float64)
    logits_RV -= logits_RV.max(1, keepdims=True)
    return (logits_RV - np.log(np.exp(logits_RV).sum(1, keepdims=True))).astype(np.float32)


def main() -> None:
    """Print a row for each cache type."""
    path, ids, num_rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    *token_ids, last = map(int, ids.read_text().split())
    next_R = np.array([*token_ids, last][-num_rows:])
    api.llama_backend_init()
    exact_RV = logprobs_of(path, token_ids, num_rows, _TYPES["f32"])
    exact_loss = -exact_RV[np.arange(num_rows), next_R].mean()
    sys.stdout.write("| llama.cpp | KL | perplexity | same top token |\n|---|---:|---:|---:|\n")
    for name, kind in list(_TYPES.items())[1:]:
        found_RV = logprobs_of(path, token_ids, num_rows, kind)
        kl = (np.exp(exact_RV) * (exact_RV - found_RV)).sum(1).mean()
        same = (exact_RV.argmax(1) == found_RV.argmax(1)).mean()
        change = np.exp(-found_RV[np.arange(num_rows), next_R].mean() - exact_loss) - 1
        sys.stdout.write(f"| {name} | {kl:.5f} | {change:+.2%} | {same:.1%} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
