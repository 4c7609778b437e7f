"""Load with transformers, and report any failure as one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.text.tokenizer import Tokenizer

# Where peft is installed, transformers loads an adapter beside the weights. It finds none there.
NO_ADAPTER = {"subfolder": "no adapter"}

_Result = TypeVar("_Result")

_GENERAL_CLASS = "TokenizersBackend"  # as transformers 5 writes PreTrainedTokenizerFast


def from_pretrained(
    factory: Any, source: str | Path | None, *, described: str | Path | None = None, **options: Any
) -> Any:
    """Load with transformers. Raises ModelError with one sentence for any failure.

    Without a source, the sentence is about what is `described`.
    """
    named = described if source is None else source
    return guarded(named, lambda: factory.from_pretrained(source, **options))


def guarded(named: str | Path | None, run: Callable[[], _Result]) -> _Result:
    """Return what `run` of transformers returns. Raises ModelError with one sentence."""
    try:
        return run()
    except ModelError:
        raise
    except Exception as error:  # transformers raises any type, depending on a file's content
        raise fault_of(named, error) from error


def fault_of(named: str | Path | None, error: Exception) -> ModelError:
    """Return an error of transformers about a model as one sentence."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = ValueError(str(error.__cause__))  # names the field, its type and its value
    first_line, *others = str(error).strip().splitlines() or [""]
    if first_line.endswith(":") and others:  # the reason stands below
        first_line = f"{first_line} {others[0].strip()}"
    if not isinstance(error, OSError | ValueError):
        first_line = f"{type(error).__name__}: {first_line}"
    return ModelError(f"{named}: {first_line}")


class _StatedTokenizer:
    """A factory of transformers tokenizers with the class that the checkpoint states.

    AutoTokenizer uses a special class for some model types, for example Qwen2. That class splits
    text in its own way and ignores tokenizer.json. If the checkpoint states the general class,
    then this factory uses it.
    """

    @staticmethod
    def from_pretrained(source: str | Path, **options: Any) -> Any:
        """Load the tokenizer; errors of transformers pass through."""
        stated = get_tokenizer_config(source).get("tokenizer_class")
        kind = PreTrainedTokenizerFast if stated == _GENERAL_CLASS else AutoTokenizer
        return kind.from_pretrained(source, **options)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises ModelError."""
    loaded = from_pretrained(_StatedTokenizer, source, trust_remote_code=trust_remote_code)
    return Tokenizer(loaded)


def leave_file(model: nn.Module) -> None:
    """Copy the remaining loaded weights out of the file mapping, in place.

    They are views of the file, which is mapped into memory as a whole. While one view lives, the
    file's pages of all packed weights stay in memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
