"""`python benchmarks/peers/logits.py FILE.gguf IDS ROWS OUT.npy`: the logprobs of llama.cpp.

It runs in an environment that has llama-cpp-python and numpy, and imports nothing of this project.
IDS and ROWS are those of `benchmarks.cpu.rounding`, which reads OUT, float32 [R, V]. The KV cache
is f16, as by default, and flash attention as llama.cpp chooses it.
"""

import sys
from pathlib import Path

import llama_cpp as api  # type: ignore[import-not-found]  # of another environment
import numpy as np
from kv_cache import TYPES, Held  # type: ignore[import-not-found]  # the script beside it

_AUTO = -1  # flash attention


def main() -> None:
    """Write the logprobs of the last rows of a text."""
    path, ids, num_rows, out = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    *token_ids, _ = map(int, ids.read_text().split())
    api.llama_backend_init()
    held = Held(path, TYPES["f16"], len(token_ids), flash=_AUTO)
    np.save(out, held.logprobs(token_ids, num_rows))


if __name__ == "__main__":
    main()
