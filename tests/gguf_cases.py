"""The architectures that are read from GGUF, each as a tiny model that can be written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.gguf_files import Written, write_model
from tests.tiny_models import tiny_model


@dataclass(frozen=True)
class Case:
    """One model and how its converter writes it."""

    name: str
    architecture: str  # of the file
    model_type: str  # of transformers
    permuted: bool = False
    norm_offset: float = 0.0
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of transformers' config
    metadata: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        """The model, with norms that stay the same when one is added and subtracted."""
        own = {"vocab_size": 300, "tie_word_embeddings": False, **self.overrides}
        model = tiny_model(self.model_type, **own)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.copy_((parameter * 1024).round() / 1024)
        return model

    def write(self, path: Path, written: Written | None = None) -> Path:
        """Write the model to a file."""
        written = written or Written()
        changed = Written({**self.metadata, **written.metadata}, written.tensors, written.encode)
        return write_model(
            path,
            self.model(),
            self.architecture,
            changed,
            permuted=self.permuted,
            norm_offset=self.norm_offset,
            renamed=self.renamed,
        )


_TIED = {"tie_word_embeddings": True}
CASES = (
    Case("llama", "llama", "llama", permuted=True),
    Case("llama-tied-biased", "llama", "llama", permuted=True,
         overrides={**_TIED, "attention_bias": True, "mlp_bias": True}),
    Case("mixtral", "llama", "mixtral", permuted=True),
    Case("qwen2", "qwen2", "qwen2"),
    Case("qwen2-tied", "qwen2", "qwen2", overrides=_TIED),
    Case("qwen3", "qwen3", "qwen3"),
    Case("qwen3moe", "qwen3moe", "qwen3_moe", overrides={"norm_topk_prob": True}),
)  # fmt: skip
