"""`python benchmarks/peers/mixture_steps.py FILE.gguf`: steps of a mixture by llama.cpp.

It runs in an environment that has llama-cpp-python, and imports nothing of this project. Each line
of its input is a number of threads and a kind of step (`mixtures_beside.py`), and it answers with
the seconds of one step. Steps are calls of llama_decode, without a server and without sampling.
"""

import sys
import time
from pathlib import Path

import llama_cpp as api  # type: ignore[import-not-found]  # of another environment

_CONTEXT = 128  # tokens before a decoded one
_SEQUENCES, _MOST_TOKENS = 9, 2304  # the last sequence is that of prompts
_AT_ONCE = 512  # tokens of a prompt in one call

Token = tuple[int, int, int]  # sequence, position, id


class Steps:
    """A loaded file, and a batch that is filled again for each step."""

    def __init__(self, path: Path) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = _SEQUENCES * _MOST_TOKENS, 512, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = _SEQUENCES, 1, 1
        self.context = api.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            sys.exit(f"llama.cpp does not load {path}")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(_AT_ONCE, 0, 1)

    def use_threads(self, count: int) -> None:
        """Compute with so many threads from now on."""
        api.llama_set_n_threads(self.context, count, count)

    def run(self, tokens: list[Token], num_last: int) -> float:
        """Compute tokens; return seconds. The last have logits."""
        self.batch.n_tokens = len(tokens)
        for at, (sequence, position, token) in enumerate(tokens):
            self.batch.token[at], self.batch.pos[at] = token, position
            self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, sequence
            self.batch.logits[at] = int(at >= len(tokens) - num_last)
        began = time.perf_counter()
        if api.llama_decode(self.context, self.batch):
            sys.exit("llama_decode failed")
        api.llama_get_logits(self.context)
        return time.perf_counter() - began

    def step(self, kind: str) -> float:
        """Compute a step of some rows, or a prompt; return seconds."""
        what, _, count = kind.partition(" ")
        if what == "rows":
            for each in range(int(count)):
                api.llama_memory_seq_rm(self.memory, each, _CONTEXT, -1)
            tokens = [(each, _CONTEXT, _token(each, _CONTEXT)) for each in range(int(count))]
            return self.run(tokens, len(tokens))
        last = _SEQUENCES - 1
        api.llama_memory_seq_rm(self.memory, last, 0, -1)
        tokens = [(last, at, _token(last, at)) for at in range(int(count))]
        parts = [tokens[at : at + _AT_ONCE] for at in range(0, len(tokens), _AT_ONCE)]
        return sum(self.run(part, int(part is parts[-1])) for part in parts)


def _token(sequence: int, at: int) -> int:
    return 7 + (5 * at + 31 * sequence) % 200


def main() -> None:
    """Answer each line of the input."""
    steps = Steps(Path(sys.argv[1]))
    for each in range(_SEQUENCES - 1):
        steps.run([(each, at, _token(each, at)) for at in range(_CONTEXT)], 1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        threads, _, kind = line.strip().partition(" ")
        steps.use_threads(int(threads))
        sys.stdout.write(f"{steps.step(kind)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
