"""`python benchmarks/peers/kv_cache.py FILE.gguf IDS ROWS [GO]`: the KV cache of llama.cpp.

It runs in an environment that has llama-cpp-python and numpy, and imports nothing of this project.
IDS is what `benchmarks.cache.kv_cache --ids IDS` has written: the tokens of the text, and the one
after them. Each cache type of keys and values is compared with f32, all with flash attention,
which quantised values need. Then decode steps at the end of the text take turns, on one thread. GO
is a file; the steps begin once it is there, when the machine is quiet.

Shapes: R = scored rows, V = vocabulary.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp as api  # type: ignore[import-not-found]  # of another environment
import numpy as np

_CHUNK = 512
_GO = 4  # place of the argument
_ROUNDS = 15
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}  # numbers of ggml


class Held:
    """A context over a cache of one type."""

    def __init__(self, path: Path, kind: int, num_tokens: int, flash: int = 1) -> None:
        params = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(str(path).encode(), params)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num_tokens + 1024, _CHUNK, _CHUNK
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = kind
        params.flash_attn_type = flash
        self.context = api.llama_init_from_model(self.model, params)
        self.batch = api.llama_batch_init(_CHUNK, 0, 1)
        self.width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def run(self, token_ids: list[int], first: int, num_rows: int) -> list[Any]:
        """Compute tokens; return the logits of the last rows, each float32 [V]."""
        batch, num = self.batch, len(token_ids)
        batch.n_tokens = num
        for at, token in enumerate(token_ids):
            batch.token[at], batch.pos[at] = token, first + at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = ctypes.c_int8(at >= num - num_rows).value
        if api.llama_decode(self.context, batch):
            sys.exit("llama_decode failed")
        rows = (api.llama_get_logits_ith(self.context, at) for at in range(num - num_rows, num))
        return [np.ctypeslib.as_array(row, (self.width,)).copy() for row in rows]

    def logprobs(self, token_ids: list[int], num_rows: int) -> Any:
        """Return the logprobs of the last rows, float32 [R, V]."""
        found, begin = [], len(token_ids) - num_rows
        for first in range(0, len(token_ids), _CHUNK):
            chunk = token_ids[first : first + _CHUNK]
            found += self.run(chunk, first, min(len(chunk), max(0, first + len(chunk) - begin)))
        logits_RV = np.stack(found).astype(np.float64)
        logits_RV -= logits_RV.max(1, keepdims=True)
        return (logits_RV - np.log(np.exp(logits_RV).sum(1, keepdims=True))).astype(np.float32)

    def decode(self, context: int) -> float:
        """Return the processor time of a decode step, in seconds."""
        began = time.process_time()
        self.run([9], context, 1)
        taken = time.process_time() - began
        api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, context, -1)
        return taken


def losses(
    path: Path, token_ids: list[int], next_R: Any, num_rows: int
) -> Iterator[tuple[str, Held]]:
    """Print how far each cache type is from f32, and yield each context."""
    exact_RV: Any = None
    exact_loss = 0.0
    sys.stdout.write("| llama.cpp | KL | perplexity | same top token |\n|---|---:|---:|---:|\n")
    for name, kind in TYPES.items():
        held = Held(path, kind, len(token_ids))
        found_RV = held.logprobs(token_ids, num_rows)
        loss = float(-found_RV[np.arange(num_rows), next_R].mean())
        if exact_RV is None:
            exact_RV, exact_loss = found_RV, loss
        kl = (np.exp(exact_RV) * (exact_RV - found_RV)).sum(1).mean()
        same = (exact_RV.argmax(1) == found_RV.argmax(1)).mean()
        change = np.exp(loss - exact_loss) - 1
        sys.stdout.write(f"| {name} | {kl:.5f} | {change:+.2%} | {same:.1%} |\n")
        sys.stdout.flush()
        yield name, held


def main() -> None:
    """Print both tables."""
    path, ids, num_rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    *token_ids, last = map(int, ids.read_text().split())
    next_R = np.array([*token_ids, last][-num_rows:])
    api.llama_backend_init()
    contexts = dict(losses(path, token_ids, next_R, num_rows))
    while len(sys.argv) > _GO and not Path(sys.argv[_GO]).exists():
        time.sleep(0.2)
    times: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(_ROUNDS):
        for name, held in contexts.items():
            times[name].append(held.decode(len(token_ids)))
    sys.stdout.write(f"\n| at {len(token_ids)} tokens | ms a step |\n|---|---:|\n")
    for name, found in times.items():
        sys.stdout.write(f"| {name} | {1e3 * statistics.median(found):.1f} |\n")


if __name__ == "__main__":
    main()
