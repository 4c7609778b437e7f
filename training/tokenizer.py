"""The embedded model's tokenizer: byte-level BPE with one token per digit.

With bytes, any text has tokens and decodes to itself. With single digits, a value of five digits is
always five tokens, and no token reveals the next one.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, USER, ASSISTANT = SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = range(4)

# A system message precedes the first turn. An answer ends with eos, as in training.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- message.content + '\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>' + message.content + eos_token -}}
    {%- else -%}
        {{- '<|user|>' + message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a tokenizer of `vocab` tokens on `texts`; ids 0 to 3 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, native_len: int) -> None:
    """Write the tokenizer in transformers' format, with a chat template.

    In the written tokenizer, every encoded text begins with bos.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy; the caller's adds no bos to pieces
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=native_len,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def whole_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words of 3 to 10 lower-case letters that are one token."""
    decoded = (tokenizer.decode([token]).strip() for token in range(tokenizer.get_vocab_size()))
    return sorted({word for word in decoded if re.fullmatch(r"[a-z]{3,10}", word)})
