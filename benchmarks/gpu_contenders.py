"""`python -m benchmarks.gpu_contenders NAME BATCH FILE`: one way of transformers, by itself.

`gpu_model` starts it in a process with a time limit. A hang or an error of CUDA then costs this
measurement only. Every round is added to the file as a line of JSON.
"""

from dataclasses import asdict
from pathlib import Path

import click
import torch

from benchmarks.gpu_model_inputs import LLAMA_3_8B, TINY, Prompts, random_model
from benchmarks.gpu_transformers import Batching, contenders
from ropewalk.studies.harness.jsonl_file import LineFile

_WARM_UP_LEN = 4  # tokens; a compiled cache is made for the full length


@click.command()
@click.argument("name")
@click.argument("batch", type=click.IntRange(min=1))
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--tiny", is_flag=True, help="Sizes for a CPU: numbers mean nothing.")
def main(name: str, batch: int, path: Path, *, tiny: bool) -> None:
    """Answer prompts in rounds, with the weights that the benchmark of whole models has."""
    sizes = TINY if tiny else LLAMA_3_8B
    device = torch.device("cpu" if tiny else "cuda")
    model = random_model(sizes.shape, sizes.native_len, sizes.dtype, device)
    prompts, lines = Prompts(sizes.shape.vocab), LineFile(path)
    num_cached = batch * (sizes.prompt_len + sizes.output_len + 256)
    contender = contenders(lambda: model, num_cached)[name]()
    warm_up_len = sizes.output_len if "compiled" in name else _WARM_UP_LEN
    contender.answer(prompts.of(sizes.prompt_len, batch), warm_up_len)
    if isinstance(contender, Batching):
        attention = contender.used_attention
        lines.add({"part": "contender", "who": name, "attention": attention})
    for number in range(sizes.rounds):
        answered = contender.answer(prompts.of(sizes.prompt_len, batch), sizes.output_len)
        row = {"part": "decode", "sequences": batch, "round": number, "who": name}
        rate = batch * sizes.output_len / answered.seconds
        lines.add({**row, **asdict(answered), "tokens_s": rate})
    contender.close()


if __name__ == "__main__":
    main()
