"""`python benchmarks/mixture_peer.py FILE.gguf THREADS`: the steps of `mixtures.py` by llama.cpp.

It runs in an environment that has llama-cpp-python, and imports nothing of this project. Times are
medians of the calls of llama_decode, without a server and without sampling.
"""

import ctypes
import statistics
import sys
import time
from pathlib import Path

import llama_cpp as api  # type: ignore[import-not-found]  # of another environment

_CONTEXT, _PROMPT, _ROUNDS = 128, 512, 30


class Steps:
    """A loaded file, and a batch that is filled again for each step."""

    def __init__(self, path: Path, num_threads: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 9 * 1024, 1024, 512
        params.n_seq_max = 9
        params.n_threads = params.n_threads_batch = num_threads
        self.context = api.llama_init_from_model(self.model, params)
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(1024, 0, 1)

    def run(self, tokens: list[tuple[int, int, int]], num_last: int) -> float:
        """Compute tokens of (sequence, position, id); return seconds. The last have logits."""
        self.batch.n_tokens = len(tokens)
        for at, (sequence, position, token) in enumerate(tokens):
            self.batch.token[at], self.batch.pos[at] = token, position
            self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, sequence
            self.batch.logits[at] = ctypes.c_int8(at >= len(tokens) - num_last).value
        began = time.perf_counter()
        if api.llama_decode(self.context, self.batch):
            sys.exit("llama_decode failed")
        api.llama_get_logits(self.context)
        return time.perf_counter() - began

    def forget(self, sequence: int, first: int) -> None:
        """Drop the tokens of a sequence from a position on."""
        api.llama_memory_seq_rm(self.memory, sequence, first, -1)


def _token(sequence: int, at: int) -> int:
    return 7 + (5 * at + 31 * sequence) % 200


def main() -> None:
    """Print a line for each kind of step."""
    path, num_threads = Path(sys.argv[1]), int(sys.argv[2])
    steps = Steps(path, num_threads)
    for sequence in range(8):
        tokens = [(sequence, at, _token(sequence, at)) for at in range(_CONTEXT)]
        steps.run(tokens, 1)
    kinds = {
        "1 row": [(0, _CONTEXT, _token(0, _CONTEXT))],
        "8 rows": [(each, _CONTEXT, _token(each, _CONTEXT)) for each in range(8)],
        "prompt": [(8, at, _token(8, at)) for at in range(_PROMPT)],
    }
    for kind, tokens in kinds.items():
        num_last = 1 if kind == "prompt" else len(tokens)
        rounds = 5 if kind == "prompt" else 2 + _ROUNDS
        took = []
        for _ in range(rounds):
            for sequence, first in {each[0]: each[1] for each in reversed(tokens)}.items():
                steps.forget(sequence, first)
            took.append(steps.run(tokens, num_last))
        median = statistics.median(took[2:])
        sys.stdout.write(
            f"{path.name} | {kind} | {num_threads} | {len(tokens) / median:.1f} tokens/s\n"
        )


if __name__ == "__main__":
    main()
