"""docs/reference/gguf.md, from the tables of model_runtime/formats: `python -m tests.gguf_page`."""

import sys

from ropewalk.model_runtime.formats.gguf.ggml import READ_TYPES, block_of
from ropewalk.model_runtime.formats.gguf.gguf_architectures import (
    ALTERNATIVES,
    ARCHITECTURES,
    Architecture,
)
from ropewalk.model_runtime.formats.gguf.gguf_blocks import UNPACKED
from ropewalk.model_runtime.formats.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS


def _row(name: str, kind: Architecture, when: str = "") -> str:
    return f"| `{name}`{when} | {kind.class_name} |"


def _architectures() -> str:
    rows = [_row(name, kind) for name, kind in ARCHITECTURES.items()]
    rows += [_row(name, kind, f" with `{key}`") for name, (key, kind) in ALTERNATIVES.items()]
    return "\n".join(sorted(rows))


def _types() -> str:
    rows = []
    for name in READ_TYPES:
        num_values, num_bytes = block_of(name)
        served = "quantised" if name in UNPACKED else "`--dtype`"
        rows.append(f"| `{name}` | {8 * num_bytes / num_values:.4g} | {served} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    pre = ", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS))
    return _PAGE.format(architectures=_architectures(), types=_types(), pre=pre)


_PAGE = """# GGUF files

`python -m tests.gguf_page` writes this page from the tables of `model_runtime/formats/`. [Models and formats](../guide/models.md#gguf) has the commands. Files of image encoders (`mmproj*`) are ignored in a folder.

## Number types

`ropewalk config check model.gguf` refuses a file with a type that is not in the table, such as `Q8_1`, `Q8_K`, `Q1_0`, `F64` and integers.

Weights of linears and of the embedding stay quantised in memory, if their type does ([quantised weights](../design/quantised-weights.md)). Other weights are dequantised at load to `--dtype`. So are all weights with `--tensor-parallel-size` and with `--weights dequantised`. The self-check compares with the dequantised model, so it says nothing about what quantisation costs.

| type | bits a value | in memory |
|---|---|---|
{types}

## Architectures

A tiny random model of each is written as GGUF and read back in the tests. Its logits must be the same to the bit. By hand, log-probabilities differed from those of llama.cpp's server by 1e-5 at most, by 1e-3 for StarCoder 2, by 1e-2 for Gemma, and by 5e-4 for scaled tables.

| general.architecture | class |
|---|---|
{architectures}

Other architectures are refused by name.

## Rotation

Rotation comes from `rope.freq_base`, `rope.dimension_count`, `rope.scaling.*` and three tensors.

- `rope_freqs.weight` is how Llama 3.1 and later models state their scaling. The server finds the settings that give its divisors. Divisors that no published setting gives are refused.
- `rope_factors_short.weight` and `rope_factors_long.weight` become a `longrope` block.
- `rope.scaling.factor` without `rope.scaling.type` is linear, as in llama.cpp.

A key `{{architecture}}.*` that is not understood is refused by name, and so is a tensor without a place. Files of Mistral 7B 0.1 and StarCoder 2 lack the sliding window. They are served with full attention, as llama.cpp serves them.

## Tokenizer

Vocabulary, merges, special tokens and the [chat templates](api.md#post-v1chatcompletions) come from the file. Read are byte-level vocabularies (`gpt2`) and sentencepiece's with scores (`llama`). Values of `tokenizer.ggml.pre` for byte-level vocabularies, of which others are refused: {pre}.

An answer ends at `eos_token_id`, `eot_token_id`, `eom_token_id`, and control tokens with a known text such as `<|im_end|>`. `add_bos_token` and `add_eos_token` are respected. If the file recommends sampling parameters (`general.sampling.*`), they are the defaults of requests, within [their limits](api.md#post-v1completions). llama.cpp's ten vocabularies with expected tokens gave these for all of their 474 texts.

## Models with states

Qwen 3.5 (`qwen35`, `qwen35moe`), Qwen 3 Next and LFM 2 are served on a CPU and on a GPU ([models with states](../design/models-with-states.md)). Layers that predict further tokens (`nextn_predict_layers`) are neither loaded nor counted. Both forms of Qwen 3 Next's files are read, with `ssm_in` or with `attn_qkv` and `attn_gate`.
"""  # noqa: E501  # a paragraph is a line of the page


def main() -> None:
    """Write the page to standard output."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
