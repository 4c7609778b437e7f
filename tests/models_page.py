"""docs/reference/models.md, from tiny random models: `python -m tests.models_page`.

The same outcomes are asserted by tests/model_runtime/loading/test_patch_model.py.
"""

import os
import re
import sys
import warnings
from dataclasses import dataclass

import structlog

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
    is_bitwise: bool
    refusal: str  # empty when served
    on_cpu: str = ""  # what runs its forward, when served
    on_gpu: str = ""
    checkpoint: Checkpoint | None = None  # when served

    def row(self) -> str:
        """The line of the page of an architecture that is served."""
        cpu, gpu = (each.partition(": ")[0] for each in (self.on_cpu, self.on_gpu))
        gpu = re.sub(", calls .*", " and modules", gpu)
        return f"| `{self.architecture}` | {self.class_name} | {cpu} | {gpu} |"

    def reason(self) -> str:
        """The refusal without what differs between architectures."""
        # The first case that fails depends on the processor.
        said = re.sub(r"(fails its self-check) on .*", r"\1", self.refusal)
        said = re.sub(r"^\w+(?:: is \w+, so | (?=mixes))", "", said)
        said = re.sub(r"(?:, which is)? not served (?:for this class )?yet$", "", said)
        return re.sub(r" \[[^]]*\]", "", re.sub(r"the index -?\d+", "an index", said))


def outcome(architecture: str, *, on_gpu: bool = False) -> Outcome:
    """Take one tiny random model over."""
    model = tiny_model(architecture)
    name = type(model).__name__
    try:
        checkpoint = prepare_model(model, byte_tokenizer(), frozenset(), {})
    except ModelError as error:
        reason = str(error).removeprefix(name).lstrip(": ")
        return Outcome(architecture, name, is_bitwise=False, refusal=reason)
    executors = _on_cpu(checkpoint), _on_gpu(architecture) if on_gpu else ""
    return Outcome(architecture, name, checkpoint.report.bitwise, "", *executors, checkpoint)


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
    prompts = PagedPrompts(model, plans, native, original.ids, states=states)
    reason = install_forward(prompts, forward, original.threshold)
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
    reasons: dict[str, list[str]] = {}
    for each in (each for each in outcomes if each.refusal):
        reasons.setdefault(each.reason(), []).append(f"`{each.architecture}`")
    refused = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())]
    not_tried = [f"| `{name}` | {reason} |" for name, reason in NOT_TRIED.items()]
    return _PAGE.format(
        num_served=len(served),
        **counts(outcomes),
        served="\n".join(served),
        refused="\n".join(refused),
        formats="\n".join(map(_format_row, [each for each in FORMATS if not each.package])),
        unread=", ".join(
            f"{each.method} ({each.packing.removeprefix('any, ')})"
            if each.packing != "any"
            else each.method
            for each in FORMATS
            if each.package
        ),
        not_tried="\n".join(not_tried),
    )


def _format_row(each: Format) -> str:
    return f"| {each.method} | {each.packing} |"


_PAGE = """# Models

`python -m tests.models_page` writes this page from tiny random models, which the self-check compares with transformers. The page has transformers' causal language models with rotation, and some of its models for images and sound. Other code of a checkpoint may also work, because the self-check decides at load.

## Served

{num_served} architectures are served. On a CPU, the answers of each are the same to the bit alone, in a batch, in chunks and token by token ([batch invariance](../design/batch-invariance.md)). A checkpoint with a tower for images or sound is served for text only. Multi-head latent attention (DeepSeek, MiniCPM 3, Youtu) is cached as keys and values of heads, which takes more memory than the latent form. SmolLM2 135M Instruct and Gemma 3 270M are also compared with their trained weights.

The last columns name what runs the forward. No GPU has run the lists of launches; tests interpret them.

| executor | device | architectures | meaning |
|---|---|--:|---|
| compiled step | CPU | {compiled} | a step of few rows is [one compiled call](../design/loading.md#one-call-a-step) |
| numpy list | CPU | {numpy} | a list of products and passes |
| modules | CPU | {cpu_modules} | transformers' own forward with our linears and attention; slower |
| flat list | GPU | {flat} | [a list of launches](../design/loading.md#a-list-of-launches); {flat_without_modules} call no module of transformers |
| modules | GPU | {gpu_modules} | transformers' own forward; slower |

| architecture (`model_type`) | class | CPU | GPU |
|---|---|---|---|
{served}

## Refused by name

| reason | architectures |
|---|---|
{refused}

[Models with states](../design/models-with-states.md) says which layers that mix tokens by a state are served. Fields of the config refuse three kinds of attention, because the self-check's prompts are too short for them:

- an index that chooses keys (`index_topk`, `index_topk_blocks`, `indexer_budget`),
- attention in chunks (`attention_chunk_size`),
- a temperature by a position that the layer counts itself (`attn_temperature_tuning`).

## Not tried

| architecture | why |
|---|---|
{not_tried}

## Quantised checkpoints

These formats are read without their packages. A [GPU](../guide/gpu.md#weights) keeps weights as they are stored. A CPU dequantises them at load, in float32, rounded once to the served number type. It keeps the experts of gpt-oss in `mxfp4`. Activations and the cache are not quantised, even if the checkpoint configures it.

| `quant_method` | packing |
|---|---|
{formats}

Refused by name: {unread}. So is a field or a tensor that is not read. [GGUF](gguf.md) has a page of its own.
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
