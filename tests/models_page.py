"""docs/models.md, written by taking tiny random models over: `python -m tests.models_page`.

The same outcomes are asserted by tests/model_runtime/loading/test_patch_model.py.
"""

import re
import sys
import warnings
from dataclasses import dataclass

import structlog

from model_runtime.attention.paged_attention import LayerPlan
from model_runtime.errors import ModelError
from model_runtime.loading.checkpoint import prepare_model
from model_runtime.quantised.scheme import FORMATS, Format
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

SERVED = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "gpt_neox", "gpt_oss", "granite", "llama", "ministral", "mistral",
    "mixtral", "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
REFUSED = (
    "falcon_h1", "gpt2", "gptj", "hunyuan_v1_dense", "lfm2", "nemotron", "phimoe", "qwen3_next",
    "recurrent_gemma", "stablelm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of taking over one architecture."""

    architecture: str
    class_name: str
    plans: tuple[LayerPlan, ...]  # empty when refused
    is_bitwise: bool
    refusal: str  # empty when served

    def row(self) -> str:
        """The outcome's line of the page."""
        if self.refusal:
            return f"| `{self.architecture}` | {self.class_name} | {self.refusal} |"
        exact = "to the bit" if self.is_bitwise else "within rounding"
        return f"| `{self.architecture}` | {self.class_name} | {self._rotation()} | {exact} |"

    def _rotation(self) -> str:
        parts = []
        rotating = [plan for plan in self.plans if plan.layer_type is not None]
        pairing = "interleaved" if rotating[0].interleaved else "half-split"
        parts.append(pairing)
        if rotating[0].rotary_dim < rotating[0].key_dim:
            parts.append("part of the head")
        if len({plan.layer_type for plan in rotating}) > 1:
            parts.append("a table per layer type")
        if len(rotating) < len(self.plans):
            parts.append("some layers not at all")
        return ", ".join(parts)


def outcome(architecture: str) -> Outcome:
    """Take one tiny random model over."""
    model = tiny_model(architecture)
    name = type(model).__name__
    try:
        checkpoint = prepare_model(model, byte_tokenizer(), frozenset(), {})
    except ModelError as error:
        reason = re.sub(r": a logit differs by .*", "", str(error)).removeprefix(name).strip()
        return Outcome(architecture, name, (), is_bitwise=False, refusal=reason)
    plans = tuple(checkpoint.plans.values())
    return Outcome(architecture, name, plans, checkpoint.report.bitwise, refusal="")


def page(outcomes: list[Outcome]) -> str:
    """The whole page."""
    served = [each.row() for each in outcomes if not each.refusal]
    refused = [each.row() for each in outcomes if each.refusal]
    formats = "\n".join(map(_format_row, FORMATS))
    return _PAGE.format(served="\n".join(served), refused="\n".join(refused), formats=formats)


def _format_row(each: Format) -> str:
    read = "no" if each.package else "yes"
    return f"| {each.method} | {each.packing} | {read} | {each.package} |"


_PAGE = """# Models

`python -m tests.models_page` writes this page. It patches a tiny random model of each architecture (four layers or more, every kind of layer, random norms) and runs the self-check. `tests/model_runtime/loading/test_patch_model.py` asserts the same results at every run. An architecture that is not listed may also work, because the self-check decides at load.

## Served

The last column compares a sequence alone, in a batch, in chunks and token by token on a CPU. It says whether the bits are the same. Mixtures of experts sort their tokens by expert, so their last bits depend on the batch.

| architecture | class | rotation | same answer in any batch |
|---|---|---|---|
{served}

## Refused by name

| architecture | class | why |
|---|---|---|
{refused}

## Quantised checkpoints

Weights of these formats are dequantised at load into the served number type, for every architecture. The arithmetic is in float32, rounded once. Activations and the cache are not quantised, even if the checkpoint asks for it. Memory is that of the served number type. The banner, `config check` and `inspect` name both. A format, field or tensor that is not read is refused by name. No package is needed for the formats that are read.

| `quant_method` | packing | read | package that would be needed |
|---|---|---|---|
{formats}
"""  # noqa: E501  # a paragraph is a line of the page


def main() -> None:
    """Write the page to standard output."""
    warnings.simplefilter("ignore")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.stdout.write(page([outcome(name) for name in (*SERVED, *REFUSED)]))


if __name__ == "__main__":
    main()
