"""The architectures that are read from GGUF, each as a tiny model that can be written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.checkpoints.gguf_files import Written, write_model
from tests.checkpoints.gguf_hybrids import delta_metadata
from tests.checkpoints.tiny_models import tiny_model


@dataclass(frozen=True)
class Case:
    """One model and how its converter writes it."""

    name: str
    architecture: str  # of the file
    model_type: str  # of transformers
    permuted: bool = False
    norm_offset: float = 0.0
    is_old: bool = False  # as converters wrote Qwen 3 Next at first
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of transformers' config
    metadata: Mapping[str, Any] = field(default_factory=dict)

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
            is_old=self.is_old,
        )


_TIED = {"tie_word_embeddings": True}
_SMALL_HEADS = {"head_dim": 16}
_VALUE_HEADS = {"linear_num_value_heads": 4}
_EVEN = {"ssm.time_step_rank": 2, "ssm.inner_size": 32}  # as many value heads as key heads
_SECTIONS = {"rope.dimension_sections": [1, 1, 0, 0]}
CASES = (
    Case("arcee", "arcee", "arcee", permuted=True),
    Case("cohere2", "cohere2", "cohere2", overrides=_TIED,
         metadata={"cohere2.logit_scale": 0.0625, "cohere2.attention.sliding_window": 24,
                   "cohere2.rope.dimension_count": 16, "cohere2.rope.scaling.type": "none"}),
    Case("command-r", "command-r", "cohere", overrides=_TIED,
         metadata={"command-r.logit_scale": 0.0625, "command-r.rope.scaling.type": "none"}),
    Case("command-r-normed", "command-r", "cohere", overrides={**_TIED, "use_qk_norm": True},
         metadata={"command-r.logit_scale": 0.0625}),
    Case("ernie4_5", "ernie4_5", "ernie4_5", overrides={**_TIED, **_SMALL_HEADS}),
    Case("exaone4", "exaone4", "exaone4",
         metadata={"exaone4.attention.sliding_window": 24,
                   "exaone4.attention.sliding_window_pattern": [True, True, True, False]}),
    Case("gemma", "gemma", "gemma", norm_offset=1.0, overrides=_TIED),
    Case("gemma2", "gemma2", "gemma2", norm_offset=1.0, overrides=_TIED,
         metadata={"gemma2.attention.sliding_window": 24, "gemma2.attn_logit_softcapping": 50.0,
                   "gemma2.final_logit_softcapping": 30.0}),
    Case("gemma3", "gemma3", "gemma3_text", norm_offset=1.0,
         overrides={**_TIED, "query_pre_attn_scalar": 16},
         metadata={"gemma3.attention.sliding_window": 24, "gemma3.rope.freq_base_swa": 10000.0,
                   "gemma3.attention.sliding_window_pattern": 4}),
    Case("glm4", "glm4", "glm4", metadata={"glm4.rope.dimension_count": 8}),
    Case("granite", "granite", "granite", permuted=True,
         overrides={"attention_multiplier": 0.125, "logits_scaling": 8.0,
                    "residual_multiplier": 0.25, "embedding_multiplier": 12.0},
         metadata={"granite.attention.scale": 0.125, "granite.logit_scale": 8.0,
                   "granite.residual_scale": 0.25, "granite.embedding_scale": 12.0}),
    Case("lfm2", "lfm2", "lfm2", overrides={**_TIED, "block_auto_adjust_ff_dim": False},
         metadata={"lfm2.shortconv.l_cache": 3, "lfm2.attention.head_count_kv": [0, 2, 0, 2],
                   "lfm2.vocab_size": 300}),
    Case("lfm2moe", "lfm2moe", "lfm2_moe", overrides=_TIED,
         metadata={"lfm2moe.shortconv.l_cache": 3, "lfm2moe.leading_dense_block_count": 1,
                   "lfm2moe.attention.head_count_kv": [0, 2, 0, 2],
                   "lfm2moe.expert_gating_func": 2, "lfm2moe.vocab_size": 300}),
    Case("llama", "llama", "llama", permuted=True),
    Case("llama-tied-biased", "llama", "llama", permuted=True,
         overrides={**_TIED, "attention_bias": True, "mlp_bias": True}),
    Case("mixtral", "llama", "mixtral", permuted=True),
    Case("olmo", "olmo", "olmo", permuted=True, overrides={"clip_qkv": 8.0},
         metadata={"olmo.attention.clamp_kqv": 8.0,
                   "olmo.attention.layer_norm_epsilon": 1e-5}),
    Case("olmo2", "olmo2", "olmo2"),
    Case("olmo3", "olmo2", "olmo3",
         metadata={"olmo2.attention.sliding_window": 24,
                   "olmo2.attention.sliding_window_pattern": [True, True, True, False]}),
    Case("phi3", "phi3", "phi3", overrides={"original_max_position_embeddings": 64},
         metadata={"phi3.rope.scaling.original_context_length": 64,
                   "phi3.rope.dimension_count": 16, "phi3.attention.sliding_window": 0}),
    Case("qwen2", "qwen2", "qwen2"),
    Case("qwen2-tied", "qwen2", "qwen2", overrides=_TIED),
    Case("qwen3", "qwen3", "qwen3"),
    Case("qwen35", "qwen35", "qwen3_5_text", norm_offset=1.0, overrides=_VALUE_HEADS,
         metadata=delta_metadata("qwen35", **_SECTIONS)),
    Case("qwen35-even", "qwen35", "qwen3_5_text", norm_offset=1.0, overrides=_TIED,
         metadata=delta_metadata("qwen35", **_SECTIONS, **_EVEN)),
    Case("qwen35moe", "qwen35moe", "qwen3_5_moe_text", norm_offset=1.0, overrides=_VALUE_HEADS,
         metadata=delta_metadata("qwen35moe", **_SECTIONS)
         | {"qwen35moe.feed_forward_length": None}),
    Case("qwen3next", "qwen3next", "qwen3_next", norm_offset=1.0, overrides=_VALUE_HEADS,
         metadata=delta_metadata("qwen3next")),
    Case("qwen3next-old", "qwen3next", "qwen3_next", norm_offset=1.0, overrides=_VALUE_HEADS,
         is_old=True, metadata=delta_metadata("qwen3next")),
    Case("qwen3moe", "qwen3moe", "qwen3_moe", overrides={"norm_topk_prob": True}),
    Case("seed_oss", "seed_oss", "seed_oss"),
    Case("smollm3", "smollm3", "smollm3", permuted=True),
    Case("starcoder2", "starcoder2", "starcoder2", overrides={"sliding_window": None}),
)  # fmt: skip
