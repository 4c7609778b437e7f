"""`python -m benchmarks.cpu.rounding MODEL.gguf FOLDER`: how far products are from float32.

Logits of a held-out text's last tokens by this server, in each number type and with activations in
eight bits, beside those of transformers over the dequantised file in float32. FOLDER gets the
tokens of each length, `IDS`; logprobs that `peers/logits.py` has left there as `LENGTH.npy` are
compared, too. No table is scaled, so no length may be beyond the trained one.

Shapes: R = scored rows, V = vocabulary.
"""

from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.cache.kv_cache import held
from ropewalk.model_runtime.attention.quantised.page_format import EXACT
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.server.corpus.held_out import library_documents

_WAYS = [
    (dtype, activations) for dtype in ("float32", "bfloat16") for activations in ("exact", "int8")
]


def texts(checkpoint: Checkpoint, lengths: list[int]) -> dict[int, list[int]]:
    """Return the beginnings of a held-out text of so many tokens, and one more."""
    text = "\n".join(each.text for each in library_documents(held_out=True))[: 8 * max(lengths)]
    ids = checkpoint.tokenizer.encode(text, add_special_tokens=True, param="text")
    if len(ids) <= max(lengths):
        raise click.BadParameter(f"--tokens: the text has {len(ids)}, got {max(lengths)}")
    return {each: ids[: each + 1] for each in lengths}


def by_transformers(path: Path, ids_of: dict[int, list[int]], num_rows: int) -> dict[int, Tensor]:
    """Return the logprobs of each length's last rows, float32 [R, V]."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    found = {}
    for length, ids in ids_of.items():
        logits_RV = model(torch.tensor([ids[:-1]]), logits_to_keep=num_rows).logits[0]
        found[length] = logits_RV.double().log_softmax(-1).float()
    return found


def row(name: str, length: int, found_RV: Tensor, exact_RV: Tensor, next_R: Tensor) -> str:
    """Return a row of the table: KL, its largest, perplexity, its change, and the same top."""
    kl_R = (exact_RV.double().exp() * (exact_RV - found_RV).double()).sum(-1)
    loss, exact_loss = (-float(each.gather(1, next_R).mean()) for each in (found_RV, exact_RV))
    same = float((found_RV.argmax(-1) == exact_RV.argmax(-1)).double().mean())
    return (
        f"| {name} | {length} | {kl_R.mean():.5f} | {kl_R.max():.4f} | {np.exp(loss):.3f} "
        f"| {np.exp(loss - exact_loss) - 1:+.2%} | {same:.1%} |"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tokens", default="512,1024,2048", show_default=True)
@click.option("--rows", default=256, show_default=True, help="Scored tokens at a text's end.")
@torch.inference_mode()
def main(model: Path, folder: Path, tokens: str, rows: int) -> None:
    """Measure a GGUF file on a CPU."""
    lengths = [int(each) for each in tokens.split(",")]
    folder.mkdir(parents=True, exist_ok=True)
    ids_of: dict[int, list[int]] = {}
    exact: dict[int, Tensor] = {}
    for dtype, activations in _WAYS:
        checkpoint = load_checkpoint(model, device="cpu", dtype=dtype, activations=activations)  # type: ignore[arg-type]
        if not ids_of:
            ids_of = texts(checkpoint, lengths)
            for length, ids in ids_of.items():
                (folder / f"{length}.ids").write_text("\n".join(map(str, ids)))
            exact = by_transformers(model, ids_of, rows)
            click.echo("| | tokens | KL | largest | perplexity | change | same top token |")
            click.echo("|---|---:|---:|---:|---:|---:|---:|")
        for length, ids in ids_of.items():
            found_RV = held(checkpoint, EXACT, length).scored(ids[:-1], rows).float()
            next_R = torch.tensor(ids[-rows:])[:, None]
            click.echo(row(f"{dtype}, {activations}", length, found_RV, exact[length], next_R))
    for length, ids in ids_of.items():
        peer = folder / f"{length}.npy"
        if peer.exists():
            next_R = torch.tensor(ids[-rows:])[:, None]
            found_RV = torch.from_numpy(np.load(peer))
            click.echo(row("llama.cpp", length, found_RV, exact[length], next_R))


if __name__ == "__main__":
    main()
