"""transformers' own loading, with one sentence for whatever goes wrong."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from model_runtime.errors import ModelError
from model_runtime.text.tokenizer import Tokenizer

_GENERAL_CLASS = "TokenizersBackend"  # as transformers 5 writes PreTrainedTokenizerFast


def from_pretrained(factory: Any, source: str | Path, **options: Any) -> Any:
    """transformers' own loading, with one sentence for whatever goes wrong. ModelError."""
    try:
        return factory.from_pretrained(source, **options)
    except Exception as error:  # transformers raises whatever a file's content leads it to
        first_line = str(error).strip().partition("\n")[0]
        if not isinstance(error, OSError | ValueError):
            first_line = f"{type(error).__name__}: {first_line}"
        if not Path(source).is_dir():
            first_line = f"there is no such folder here, and as a hub id: {first_line}"
        raise ModelError(f"{source}: {first_line}") from error


class _StatedTokenizer:
    """transformers' tokenizer of the class that a checkpoint states.

    AutoTokenizer gives some model types, Qwen2 among them, a class of their own, which splits text
    its own way whatever tokenizer.json says; not here where the general class is stated.
    """

    @staticmethod
    def from_pretrained(source: str | Path, **options: Any) -> Any:
        """The loaded tokenizer; raises what transformers raises."""
        stated = get_tokenizer_config(source).get("tokenizer_class")
        kind = PreTrainedTokenizerFast if stated == _GENERAL_CLASS else AutoTokenizer
        return kind.from_pretrained(source, **options)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder or hub id. Raises ModelError."""
    loaded = from_pretrained(_StatedTokenizer, source, trust_remote_code=trust_remote_code)
    return Tokenizer(loaded)
