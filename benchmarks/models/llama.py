"""Write a Llama as a folder, with random weights from a fixed seed.

The benchmarks do not judge answers, so the models are not trained. Weights are scaled so that
activations neither vanish nor grow with depth. Logits differ by about 2 from token to token.
"""

from dataclasses import dataclass
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training.text import tokenizer_texts
from training.tokenizer import BOS_ID, EOS_ID, save_tokenizer, train_tokenizer

_SEED = 7
_LOGIT_SPREAD = 2.0
_NATIVE_LEN = 32_768  # tokens, so that no server needs an override in any scenario
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama whose LM head is not tied to the embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 64


SHAPES = {
    "small": Shape(384, 8, 6, 2, 1536, 4096),  # 20 M parameters
    "medium": Shape(768, 12, 12, 4, 2048, 32_000),  # 125 M
    "1b": Shape(2048, 22, 32, 4, 5632, 32_000),  # 1.1 billion, TinyLlama's shape
}


def build(shape: Shape, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Build the model in float32, with the same weights each time."""
    model = LlamaForCausalLM(llama_config(shape, _NATIVE_LEN, bos_id=BOS_ID, eos_id=EOS_ID))
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    fill(model, shape, torch.Generator().manual_seed(_SEED))
    # Greedy answers then have whole characters only. A server holds back a token that is a part of
    # a character, and its event would come late.
    with torch.no_grad():
        model.lm_head.weight[_unspeakable(tokenizer, shape.vocab)] = 0
    return model.eval()


def llama_config(
    shape: Shape,
    native_len: int,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    dtype: torch.dtype | None = None,
) -> LlamaConfig:
    """Build the configuration; without `eos_id`, every answer has the requested length."""
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=native_len,
        tie_word_embeddings=False,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        dtype=dtype,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


def fill(model: nn.Module, shape: Shape, seeded: torch.Generator) -> None:
    """Fill a model with Gaussian weights whose products keep the size of their inputs.

    Weights of products that add to the residual are smaller if there are more layers. `seeded`: a
    generator of the device that holds the weights.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # the weight of a norm
            nn.init.ones_(weight)
            continue
        scale = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= (2 * shape.layers) ** -0.5
        if name.startswith("lm_head"):
            scale *= _LOGIT_SPREAD
        nn.init.normal_(weight, std=scale, generator=seeded)


def _unspeakable(tokenizer: Tokenizer, vocab: int) -> list[int]:
    """Return ids without a text: special tokens, parts of characters, ids without a token."""
    texts = tokenizer.decode_batch([[token] for token in range(vocab)])
    return [token for token, text in enumerate(texts) if not text or _REPLACEMENT in text]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice(list(SHAPES)))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(name: str, folder: Path) -> None:
    """Write the model NAME to FOLDER, in transformers' format."""
    shape = SHAPES[name]
    tokenizer = train_tokenizer(tokenizer_texts(), shape.vocab)
    model = build(shape, tokenizer)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, _NATIVE_LEN)
    num_parameters = sum(each.numel() for each in model.parameters())
    click.echo(f"{folder}: {num_parameters / 1e6:.1f} M parameters", err=True)
