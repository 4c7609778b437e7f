"""`python -m benchmarks.gpu.transformers NAME BATCH FILE`: one way of transformers, by itself.

The ways are `generate`, and its continuous batching. All take prompts of one length, and answer
each with a fixed number of greedy tokens. `benchmarks.gpu.model` starts each in a process with a
time limit, so a hang or an error of CUDA costs one measurement only. Every round is added to the
file as a line of JSON.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import click
import torch
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.gpu.engine import free_memory
from benchmarks.gpu.model_inputs import LLAMA_3_8B, TINY, Prompts, random_model
from ropewalk.studies.harness.jsonl_file import LineFile

_Prompts = Sequence[Sequence[int]]
_WARM_UP_LEN = 4  # tokens; a compiled cache is made for the full length


@dataclass(frozen=True, slots=True)
class Answered:
    """The times of answers that were generated together."""

    seconds: float  # from sending to the last token of the last answer
    step_s: float | None = None  # median time between two tokens, if reported


class Contender(Protocol):
    """A way of transformers to answer prompts."""

    def answer(self, prompts: _Prompts, num_output: int) -> Answered:
        """Answer all prompts together. Raises RuntimeError if an answer has another length."""

    def close(self) -> None:
        """Free its memory; the weights stay."""


def _greedy(num_output: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=num_output, do_sample=False, eos_token_id=None, pad_token_id=0, **more
    )


class Generating:
    """`model.generate` with one batch. `cache` is dynamic, or static, which is compiled."""

    def __init__(self, model: LlamaForCausalLM, cache: str) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def answer(self, prompts: _Prompts, num_output: int) -> Answered:
        """See Contender."""
        device = self._model.device
        begin = _now(device)
        ids = torch.tensor(prompts, device=device)
        config = _greedy(num_output, cache_implementation=self._cache)
        answers = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        took = _now(device) - begin
        num_new = answers.shape[1] - ids.shape[1]
        if num_new != num_output:
            raise RuntimeError(f"generate gave {num_new} tokens, {num_output} were asked for")
        return Answered(took)

    def close(self) -> None:
        """See Contender."""
        if "_compiled_call" in vars(self._model):  # generate does not remove it
            delattr(self._model, "_compiled_call")
        torch.compiler.reset()
        free_memory()


class Batching:
    """`model.generate_batch`: continuous batching, with a manager that is kept between calls.

    `more`: fields of transformers' ContinuousBatchingConfig. The cache's size is fixed, so that
    memory is left for other contenders, and a step has at most 8,192 tokens. Fields that are not
    set keep their defaults.
    """

    def __init__(self, model: LlamaForCausalLM, num_cached: int, **more: Any) -> None:
        self._model = model
        # The size of a block has two names, depending on the release.
        block = ContinuousBatchingConfig()
        size: int = getattr(block, "page_size", None) or block.block_size
        self._attention, switch = _attention()
        self._config = ContinuousBatchingConfig(
            num_blocks=2 + -(-num_cached // size), max_batch_tokens=8192, **switch, **more
        )
        self.used_attention = ""  # the attention that answered

    def answer(self, prompts: _Prompts, num_output: int) -> Answered:
        """See Contender. The first call also warms up, and must not be counted."""
        with _attending(self._model, self._attention):
            if not self.used_attention:
                self.used_attention = self._chosen_attention()
            answers: Mapping[str, Any] = self._model.generate_batch(
                [list(each) for each in prompts],
                generation_config=_greedy(num_output),
                continuous_batching_config=self._config,
                record_timestamps=True,
                persistent_manager=True,
            )
        found = list(answers.values())
        lengths = [len(each.generated_tokens) for each in found]
        errors = [each.error for each in found if each.error]
        if errors or lengths != [num_output] * len(prompts):
            raise RuntimeError(
                f"generate_batch answered {len(lengths)} of {len(prompts)} prompts, with "
                f"{sorted(set(lengths))} tokens; {errors[:1]}"
            )
        # Its own timestamps leave out the start and the end of its thread.
        begin = min(each.created_time for each in found)
        end = max(each.lifespan[1] for each in found)
        gaps = [later - earlier for each in found for earlier, later in pairwise(each.timestamps)]
        return Answered(end - begin, median(gaps))

    def _chosen_attention(self) -> str:
        """Return the attention that it chooses in place of the given one."""
        self._model.init_continuous_batching(_greedy(1), self._config)
        chosen: str = self._model.config._attn_implementation  # noqa: SLF001  # as below
        self._model.set_attn_implementation(self._attention)
        return chosen

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
        free_memory()


def _attention() -> tuple[str, dict[str, Any]]:
    """Return the attention to begin with, and further fields of the configuration.

    If flash attention is installed, transformers switches to it. If it is not installed,
    transformers would look for a kernel to download, but there is no network.
    """
    if find_spec("flash_attn") or find_spec("flash_attn_interface"):
        return "sdpa", {}
    if any(field.name == "auto_switch_to_flash" for field in fields(ContinuousBatchingConfig)):
        return "sdpa", {"auto_switch_to_flash": False}
    return "paged|sdpa", {}  # the same, in releases without the switch


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _attending(model: LlamaForCausalLM, attention: str) -> Iterator[None]:
    before = model.config._attn_implementation  # noqa: SLF001  # there is no other way to read it
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def contenders(model: LlamaForCausalLM, num_cached: int) -> Mapping[str, Callable[[], Contender]]:
    """Return name -> function that makes the contender.

    `num_cached`: tokens in the cache of continuous batching.
    """
    return {
        "generate": lambda: Generating(model, "dynamic"),
        "continuous": lambda: Batching(model, num_cached),
        "continuous, graphs": lambda: Batching(model, num_cached, use_cuda_graph=True),
        "generate, compiled": lambda: Generating(model, "static"),
    }


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
    contender = contenders(model, num_cached)[name]()
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
