"""`python -m benchmarks.cache.held_windows MODEL`: a long context in the least cache that holds it.

For each format, two engines answer the same prompt of held-out text: one whose layers with a window
keep all tokens, and one whose layers hold their window. Each cache is the smallest that the engine
admits the context to. The bytes are those of its tensors.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from ropewalk.model_runtime.attention.quantised.page_format import EXACT, FORMATS
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.page_groups import ONE_GROUP, PageGroups, group_layers
from ropewalk.model_runtime.request import Output, Request, SamplingParams
from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.corpus.held_out import library_documents

_PAGE = 64


def answered(
    checkpoint: Checkpoint,
    token_ids: list[int],
    config: EngineConfig,
    num_new: int,
) -> tuple[list[Output], int, float]:
    """Return the answer to a prompt, the bytes of the cache, and the seconds that it took."""
    engine = build_engine(checkpoint, config)
    runner: Any = engine._core._runner  # noqa: SLF001  # its cache is for itself alone
    deployment = make_deployment("model", checkpoint.native, page_size=_PAGE)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, logprobs=1, ignore_eos=True)
    tier_choice = deployment.choose(RopeRequest(), len(token_ids), num_new)
    began = time.monotonic()
    engine.start()
    try:
        asked = Request("long", tuple(token_ids), sampling, tier_choice)
        outputs = list(engine.generate([asked])[0])
        return outputs, runner.store.num_bytes, time.monotonic() - began
    finally:
        engine.stop()


def smallest(config: EngineConfig, groups: PageGroups) -> EngineConfig:
    """Return the config with the least cache that admits a context of max_model_len."""
    config = replace(config, page_groups=groups)
    num_pages = config.num_held_pages(config.max_model_len)
    return replace(config, kv_cache_tokens=-(-num_pages // config.num_groups) * _PAGE)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--formats", default=",".join((EXACT, *FORMATS)), show_default=True)
@click.option("--context", default=32768, show_default=True, help="Prompt and answer.")
@click.option("--new", "num_new", default=32, show_default=True, help="Tokens of the answer.")
@click.option("--step", default=512, show_default=True, help="max_num_batched_tokens.")
def main(model: Path, formats: str, context: int, num_new: int, step: int) -> None:
    """Measure a folder or GGUF file on a CPU, with one thread."""
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(model, device="cpu")
    text = "\n".join(each.text for each in library_documents(held_out=True))[: 8 * context]
    token_ids = checkpoint.tokenizer.encode(text, add_special_tokens=True, param="text")
    if len(token_ids) < context - num_new:
        raise click.BadParameter(f"--context: the text has {len(token_ids)} tokens, got {context}")
    groups, reason = group_layers(checkpoint.windows, checkpoint.plans, context)
    if not groups.has_windows:
        raise click.ClickException(reason or "no layer of the model has a window below --context")
    click.echo("\n| format | layers keep | cache | seconds | the same answer |")
    click.echo("|---|---|---:|---:|---|")
    for kind in formats.split(","):
        config = EngineConfig(
            kv_cache_tokens=0, max_model_len=context, page_size=_PAGE, kv_cache_dtype=kind,
            max_num_seqs=1, max_num_batched_tokens=step,
        )  # fmt: skip
        before = None
        for name, each in (("all tokens", ONE_GROUP), ("their window", groups)):
            prompt = token_ids[: context - num_new]
            outputs, size, seconds = answered(checkpoint, prompt, smallest(config, each), num_new)
            answer = [(output.token_ids, output.logprobs) for output in outputs]
            same = "" if before is None else ("yes, to the bit" if before == answer else "no")
            click.echo(f"| {kind} | {name} | {size_text(size)} | {seconds:.0f} | {same} |")
            before = answer


if __name__ == "__main__":
    main()
