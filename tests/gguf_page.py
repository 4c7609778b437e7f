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

_RATES = "exp of decay rates"
_OF_STATES = {
    "qwen35": [_RATES],
    "qwen35moe": [_RATES],
    "qwen3next": [_RATES, "parts of a joined projection"],
}


def _row(name: str, kind: Architecture, when: str = "") -> str:
    undone = []
    if kind.are_pairs_adjacent:
        undone.append("order of the rows of q and k")
    if kind.norm_offset:
        undone.append("one added to norms")
    if kind.are_value_heads_tiled:
        undone.append("order of value heads")
    undone += _OF_STATES.get(name, [])
    return f"| `{name}`{when} | {kind.class_name} | {', '.join(undone) or '-'} |"


def _architectures() -> str:
    rows = [_row(name, kind) for name, kind in ARCHITECTURES.items()]
    rows += [_row(name, kind, f" with `{key}`") for name, (key, kind) in ALTERNATIVES.items()]
    return "\n".join(sorted(rows))


def _types() -> str:
    rows = []
    for name in READ_TYPES:
        num_values, num_bytes = block_of(name)
        rows.append(f"| `{name}` | {num_values} | {8 * num_bytes / num_values:.4g} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    pre = ", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS))
    kept = ", ".join(f"`{name}`" for name in UNPACKED)
    return _PAGE.format(architectures=_architectures(), types=_types(), pre=pre, kept=kept)


_PAGE = """# GGUF files

`python -m tests.gguf_page` writes this page from the tables of `model_runtime/formats/`.

`ropewalk serve model.gguf` serves a file. A folder works if it holds one model in GGUF and no safetensors. `--gguf-file NAME` chooses a file of a folder. `inspect` and `eval` take the same, and the keys `model` and `gguf_file` of the YAML file that `config check` reads. The first part of a split file (`-00001-of-00003.gguf`) stands for all parts. Files of image encoders (`mmproj*`) are ignored in a folder.

## Memory

Weights of linears and of the embedding stay quantised, if they have one of the types {kept} ([quantised weights](../design/quantised-weights.md)). Weights of other types are dequantised at load. So are all weights with `--tensor-parallel-size` and with `--weights dequantised`. They take the memory of the same model in `--dtype`. One tensor at a time is read.

The weights that are served are the file's values, rounded once. The self-check compares with the dequantised model, so it says nothing about what quantisation costs.

## Rotation

Rotation comes from `rope.freq_base`, `rope.dimension_count`, `rope.scaling.*` and three tensors.

- `rope_freqs.weight` is how Llama 3.1 and later models state their scaling. It has a divisor for each pair. The server finds the settings that give these divisors, and the table is transformers' to the bit. Divisors that no published setting gives are refused.
- `rope_factors_short.weight` and `rope_factors_long.weight` become a `longrope` block.
- `rope.scaling.factor` without `rope.scaling.type` is linear, as in llama.cpp.
- `rope.scaling.yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow` are the fields of the config that converters write there. llama.cpp reads them for a few architectures only.

A key `{{architecture}}.*` that is not understood is refused by name, and so is a tensor without a place. transformers' own GGUF loader drops them, and with them all scaling.

Numbers in the metadata are float32. They are read as the shortest decimal that gives the same float32, for example 1e-05.

Two things are not in such files. Llama's converter drops the sliding window of Mistral 7B 0.1, and StarCoder 2's drops its window, too. Those models are served with full attention, as llama.cpp serves them.

## Tokenizer

Vocabulary, merges, special tokens and the [chat templates](api.md#post-v1chatcompletions) come from the file. `tokenizer.ggml.pre` decides how text is split before it is merged. Unknown values are refused, because another split gives other tokens. Read are byte-level vocabularies (`gpt2`) and sentencepiece's with scores (`llama`). Values of `tokenizer.ggml.pre` for byte-level vocabularies: {pre}.

An answer ends at `eos_token_id`, `eot_token_id` and `eom_token_id`. Control tokens with a known text such as `<|im_end|>` end it, too, because older files lack the second key. `add_bos_token` and `add_eos_token` are respected. The id 4294967295, which converters write for a token that the vocabulary lacks, is ignored with a warning, as in llama.cpp. If the file recommends sampling parameters (`general.sampling.*`), they are the defaults of requests, within [their limits](api.md#post-v1completions).

Tokens were compared with llama.cpp's by hand: its ten vocabularies with expected tokens gave these for all of their 474 texts.

## Architectures

`tests/checkpoints/gguf_cases.py` has a tiny random model of each. It is written as GGUF and read back. Its weights and logits must be the same to the bit, and it must pass the self-check.

| general.architecture | class | undone at load |
|---|---|---|
{architectures}

Log-probabilities were compared with llama.cpp's server by hand, in float32. They differ by 1e-5 at most, by 1e-3 for StarCoder 2, by 1e-2 for Gemma, and by 5e-4 for scaled tables.

One is added to the norms of Gemma and Qwen's hybrids in float32 by converters, so their last bits are lost in the file.

## Models with states

Qwen 3.5 (`qwen35`, `qwen35moe`), Qwen 3 Next and LFM 2 are served on a CPU and on a GPU, as from safetensors ([models with states](../design/models-with-states.md)). Other architectures whose layers keep states are refused by name.

- The converter of Qwen 3.5 puts the first value head of every key head first. The model has the heads of a key head beside each other. Rows are put back when the file is read. The columns of a quantised `ssm_out` cannot be, because a block may hold several heads. So its inputs are put in the order of the file at each call, with `--weights dequantised` too.
- The file has the decay rate `-exp(A_log)`. The logarithm is found whose exp in float32 is the file's number.
- Layers that predict further tokens (`nextn_predict_layers`) are neither loaded nor counted.
- `rope.dimension_sections` has no effect on text.
- Older files of Qwen 3 Next have one tensor `ssm_in`, newer ones have `attn_qkv` and `attn_gate`. Both are read.

## Number types

Each is compared with the package `gguf`, which dequantises it. Refused are `Q8_1`, `Q8_K`, `Q1_0` and integers, because the package does not dequantise them.

| type | values in a block | bits a value |
|---|---|---|
{types}
"""  # noqa: E501  # a paragraph is a line of the page


def main() -> None:
    """Write the page to standard output."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
