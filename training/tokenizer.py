"""The embedded model's tokenizer: byte-level BPE, every digit a token of its own.

Bytes, so that any text has tokens and comes back as it was. Single digits, so that a value of five
digits is always five tokens and none of them tells of the next.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, USER, ASSISTANT = SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = range(4)

# A system message stands before the first turn. An answer ends with eos, as it does in training.
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
    """The `vocab` most useful tokens of `texts`; ids 0 to 3 are the special ones."""
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
    """As transformers reads it: every text begins with bos, and there is a chat template."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the caller's puts no bos before pieces
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
    """Words of 3 to 10 small letters that are one token."""
    decoded = (tokenizer.decode([token]).strip() for token in range(tokenizer.get_vocab_size()))
    return sorted({word for word in decoded if re.fullmatch(r"[a-z]{3,10}", word)})
