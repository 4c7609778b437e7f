"""The embedded model with another number of rows than its tokenizer has tokens."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

NUM_TOKENS = 2048  # of the embedded model's tokenizer, and rows of its embedding
MARKERS = ("<tool_call>", "</tool_call>", "<|fin|>")  # added tokens, from NUM_TOKENS on
_EMBEDDING = "model.embed_tokens.weight"


def resized(folder: Path, num_rows: int) -> Path:
    """A copy of the embedded model with so many rows, and with three special tokens more.

    New rows are copies of old ones, so that their tokens are sampled, too.
    """
    shutil.copytree(EMBEDDED_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    rows = weights[_EMBEDDING]
    while len(rows) < num_rows:
        rows = torch.cat([rows, rows[: num_rows - len(rows)]])
    weights[_EMBEDDING] = rows[:num_rows].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _change(folder / "config.json", vocab_size=num_rows)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": NUM_TOKENS + at, "content": marker}
        for at, marker in enumerate(MARKERS)
    ]
    path.write_text(json.dumps(tokenizer))
    return folder


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
