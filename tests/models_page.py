"""docs/reference/models.md, from tiny random models: `python -m tests.models_page`.

The same outcomes are asserted by tests/model_runtime/loading/test_patch_model.py.
"""

import os
import re
import sys
import warnings
from dataclasses import dataclass

import structlog

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.quantised_scheme import FORMATS, Format
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers, program_of
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, prepare_model
from ropewalk.model_runtime.loading.install_forward import install_forward
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_with_states
from ropewalk.model_runtime.loading.self_check import PagedPrompts
from ropewalk.model_runtime.probing.untouched import original_logits
from ropewalk.model_runtime.tracing.operations import UntraceableError
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer

# Models with towers for images or sound, of which only the text's part is made and served.
WITH_TOWERS = (
    "cohere2_vision", "exaone4_5", "glm4v", "glm4v_moe", "idefics3", "internvl", "kimi_k25",
    "lfm2_vl", "llava", "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral",
)  # fmt: skip
SERVED = tuple(sorted((
    *WITH_TOWERS,
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bitnet", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "emu3", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "fuyu", "gemma", "gemma2",
    "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss",
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hy_v3",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "lfm2",
    "lfm2_moe", "lfm3", "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
)))  # fmt: skip
REFUSED = (
    "axk2", "bailing_hybrid", "bamba", "beam", "codegen", "deepseek_v32", "deepseek_v4",
    "diffllama", "doge", "dots3_note_text", "falcon", "falcon_h1", "glm_moe_dsa", "gpt2",
    "gpt_neox_japanese", "gptj", "granitemoehybrid", "hrm_text", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v4", "kimi_linear", "llama4", "llama4_text", "longcat_flash",
    "minimax", "minimax_m3_vl_text", "nanochat", "olmo_hybrid", "phimoe", "qwen4_exp",
    "qwen4_exp_text", "recurrent_gemma", "roformer", "zamba2", "zaya",
)  # fmt: skip
# Served, with experts outside transformers' interface, and routers that follow no rules for ties.
OUTSIDE = ("dbrx", "jetmoe")
# Architecture -> its real checkpoints in tests/real.
REAL = {
    "llama": ("SmolLM2 135M Instruct",),
    "gemma3_text": ("Gemma 3 270M",),
}
# Architectures with rotation that are not tried -> the reason.
NOT_TRIED = {
    "blt": "reads bytes in patches that a second model cuts",
    "dots3_note": "reads images; the text decoder is `dots3_note_text`",
    "gemma3n": "its image and audio towers have no small form; the text decoder is `gemma3n_text`",
    "gemma4_assistant": "drafts tokens for a Gemma 4, whose cache it reads",
    "gemma4_unified_assistant": "drafts tokens for a Gemma 4, whose cache it reads",
    "got_ocr2": "reads images; the text decoder is `qwen2`",
    "mllama": "attends to images in layers of their own",
    "moshi": "continues speech",
    "moss_transcribe_diarize": "transcribes speech; the text decoder is `qwen3`",
    "phi4_multimodal": "its image and audio towers have no small form",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of taking over one architecture."""

    architecture: str
    class_name: str
    plans: tuple[LayerPlan, ...]  # empty when refused
    is_bitwise: bool
    refusal: str  # empty when served
    on_cpu: str = ""  # what runs its forward, when served
    on_gpu: str = ""
    checkpoint: Checkpoint | None = None  # when served

    def row(self) -> str:
        """The outcome's line of the page."""
        cells = [f"`{self.architecture}`", self.class_name]
        if self.refusal:
            cells.append(self.refusal)
        else:
            exact = "to the bit" if self.is_bitwise else "within rounding"
            weights = ["adversarial", *REAL.get(self.architecture, ())]
            cells += [self._rotation(), exact, self.on_cpu, self.on_gpu, ", ".join(weights)]
        return f"| {' | '.join(cells)} |"

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


def outcome(architecture: str, *, on_gpu: bool = False) -> Outcome:
    """Take one tiny random model over."""
    model = tiny_model(architecture)
    name = type(model).__name__
    try:
        checkpoint = prepare_model(model, byte_tokenizer(), frozenset(), {})
    except ModelError as error:
        # The first case that fails depends on the processor.
        reason = re.sub(r"(fails its self-check) on .*", r"\1", str(error))
        reason = reason.removeprefix(name).lstrip(": ")
        return Outcome(architecture, name, (), is_bitwise=False, refusal=reason)
    plans = tuple(checkpoint.plans.values())
    executors = _on_cpu(checkpoint), _on_gpu(architecture) if on_gpu else ""
    return Outcome(architecture, name, plans, checkpoint.report.bitwise, "", *executors, checkpoint)


def _on_cpu(checkpoint: Checkpoint) -> str:
    """What runs a model's forward on a CPU, and why no other."""
    forward = vars(checkpoint.model).get("forward")
    if isinstance(forward, DecoderLayers):
        return "compiled step" if forward.multiplying is not None else "numpy list"
    try:
        program_of(checkpoint.model, checkpoint.plans)
    except UntraceableError as error:
        return f"modules: {error}"
    return "modules: its list has other bits"


def _on_gpu(architecture: str) -> str:
    """What runs a model's forward on a GPU, and why no other. Kernels are interpreted."""
    from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward  # imports triton
    from ropewalk.model_runtime.gpu.program.trace import traced

    model = tiny_model(architecture)
    native = read_native_rope(model)
    original = original_logits(model, native)
    plans, states = patch_with_states(model, native)
    try:
        forward = FlatForward(model, traced(model, plans), plans)
    except UntraceableError as error:
        return f"modules: {error}"
    prompts = PagedPrompts(model, plans, native, original, states=states)
    reason = install_forward(prompts, forward)
    if reason is not None:
        return f"modules: its list {reason}"
    whole = {type(each.module).__name__ for each in forward._launches if each.module is not None}
    return f"flat list, calls {' and '.join(sorted(whole))}" if whole else "flat list"


def counts(outcomes: list[Outcome]) -> dict[str, int]:
    """How many served architectures each executor runs, by the words of the page."""
    served = [each for each in outcomes if not each.refusal]
    return {
        "compiled": sum(each.on_cpu == "compiled step" for each in served),
        "numpy": sum(each.on_cpu == "numpy list" for each in served),
        "cpu_modules": sum(each.on_cpu.startswith("modules") for each in served),
        "flat": sum(each.on_gpu.startswith("flat list") for each in served),
        "flat_without_modules": sum(each.on_gpu == "flat list" for each in served),
        "gpu_modules": sum(each.on_gpu.startswith("modules") for each in served),
    }


def page(outcomes: list[Outcome]) -> str:
    """The whole page."""
    served = [each.row() for each in outcomes if not each.refusal]
    refused = [each.row() for each in outcomes if each.refusal]
    not_tried = [f"| `{name}` | {reason} |" for name, reason in NOT_TRIED.items()]
    return _PAGE.format(
        num_served=len(served),
        **counts(outcomes),
        served="\n".join(served),
        refused="\n".join(refused),
        formats="\n".join(map(_format_row, FORMATS)),
        not_tried="\n".join(not_tried),
    )


def _format_row(each: Format) -> str:
    read = "no" if each.package else "yes"
    return f"| {each.method} | {each.packing} | {read} | {each.package} |"


_PAGE = """# Models

`python -m tests.models_page` writes this page. It patches a tiny random model of each architecture (four layers or more, every kind of layer, random norms) and runs the self-check. `tests/model_runtime/loading/test_patch_model.py` asserts these results at every run. The page has every architecture of transformers' causal language models whose config has rotation, and some of its models for images and sound. Code from a checkpoint may also work, because the self-check decides at load.

## Served

{num_served} architectures are served. A checkpoint with a tower for images or sound is served for text only. Its towers are not read, which a warning says. Every such model of transformers whose text has a decoder of its own is tried at load, and the self-check decides. Multi-head latent attention (DeepSeek, MiniCPM 3, Youtu) is cached as the keys and values of its heads, which takes more memory than the latent form.

The fourth column compares a sequence alone, in a batch, in chunks and token by token on a CPU. It says whether the answers are the same to the bit ([batch invariance](../design/batch-invariance.md)).

The fifth and sixth columns say what runs the forward of a model, as `install_forward.py` decides at load.

| executor | device | architectures | meaning |
|---|---|--:|---|
| compiled step | CPU | {compiled} | a step of few rows is one compiled call, and one of many rows a list of products and passes ([loading](../design/loading.md#one-call-a-step)) |
| numpy list | CPU | {numpy} | every step is that list, because the compiled call lacks a product |
| modules | CPU | {cpu_modules} | transformers' own forward; the column has the first operation without a kernel |
| flat list | GPU | {flat} | a list of launches ([loading](../design/loading.md#a-list-of-launches)); {flat_without_modules} of them call no module of transformers |
| modules | GPU | {gpu_modules} | transformers' own forward, with norms of one kernel; the column has the first operation without a launch |

The experts of a block that keeps its own code, for example, are not computed by torch ([loading](../design/loading.md#mixtures-of-experts)). For the sixth column the launches are interpreted on a CPU. No GPU has run them.

The last column says which weights stand behind a row, besides small random ones:

- *adversarial*: tiny models with the numbers of trained weights, such as zeros in norms, embeddings of zero and outliers (`tests/checkpoints/adversarial_weights.py`). `tests/model_runtime/loading/test_adversarial_weights.py` compares them with transformers, and `make test-full` does so for every architecture.
- a name: a checkpoint as people download it, compared with transformers in `tests/real`.

| architecture | class | rotation | same answer in any batch | CPU | GPU | weights |
|---|---|---|---|---|---|---|
{served}

## Refused by name

| architecture | class | why |
|---|---|---|
{refused}

Layers that keep a state of each sequence are served for the classes above, on a CPU and on a GPU ([models with states](../design/models-with-states.md)). For other classes the refusal names the class of the layer.

Three kinds of attention are refused by fields of the config, because the self-check's prompts are too short to see them:

- an index that chooses keys (`index_topk`, `index_topk_blocks`, `indexer_budget`),
- attention in chunks (`attention_chunk_size`),
- a temperature by a position that the layer counts itself (`attn_temperature_tuning`).

## Not tried

| architecture | why |
|---|---|
{not_tried}

## Quantised checkpoints

A GPU keeps weights of these formats as they are stored ([weights on a GPU](../guide/gpu.md#weights)), if a linear or the experts of a layer hold them under the file's names. A CPU dequantises them at load into the served number type. It keeps the experts of gpt-oss in `mxfp4` ([quantised weights](../design/quantised-weights.md#experts)). The arithmetic is in float32, rounded once. Activations and the cache are not quantised, even if the checkpoint configures it. The banner, `config check` and `inspect` name formats and memory. A format, field or tensor that is not read is refused by name. No package is needed for the formats that are read.

| `quant_method` | packing | read | package that would be needed |
|---|---|---|---|
{formats}

GGUF files have a page of their own ([GGUF](gguf.md)).
"""  # noqa: E501  # a paragraph is a line of the page


def main() -> None:
    """Write the page to standard output."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # it has to be there when Triton is imported
        again = [sys.executable, "-m", "tests.models_page"]
        os.execve(sys.executable, again, {**os.environ, "TRITON_INTERPRET": "1"})  # noqa: S606  # this one
    warnings.simplefilter("ignore")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.stdout.write(page([outcome(name, on_gpu=True) for name in (*SERVED, *REFUSED)]))


if __name__ == "__main__":
    main()
