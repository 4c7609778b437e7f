"""A tokenizer that needs no file: each byte is one token."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ropewalk.model_runtime.text.tokenizer import Tokenizer


def byte_tokenizer_fast() -> PreTrainedTokenizerFast:
    """GPT-2's byte alphabet without merges; ids are the order of that alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({each: index for index, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_tokenizer() -> Tokenizer:
    """The same tokenizer in the runtime's own class."""
    return Tokenizer(byte_tokenizer_fast())
