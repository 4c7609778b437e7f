"""The files of models with states: their configs, and the order of the numbers in their tensors.

Sources: llama.cpp's converters (`conversion/qwen.py`, `conversion/lfm2.py`), which wrote the files,
and its model graphs (`qwen35.cpp`, `qwen3next.cpp`, `lfm2.cpp`) for what they leave out.

Shapes: H = value heads, R = rows of a weight.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.formats.gguf.gguf_config import Fields

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]
Rows = NDArray[np.int64]
_KEY_HEADS = "attention.head_count_kv"
_SIGMOID = 2  # of llama.cpp's `expert_gating_func`
_LOWEST_LOG = -200.0  # float32's exp gives zero, as for any lower number


def qwen35(fields: Fields, config: Config) -> Config:
    """Return the config's values of Gated DeltaNet, and which layers have it. Raises ModelError."""
    num_key_heads, num_heads = (
        fields.integer("ssm.group_count"),
        fields.integer("ssm.time_step_rank"),
    )
    inner = fields.integer("ssm.inner_size")
    if num_heads % num_key_heads:
        raise fields.refuse(
            "ssm.time_step_rank", f"must be a multiple of {num_key_heads}, got {num_heads}"
        )
    if inner % num_heads:
        raise fields.refuse("ssm.inner_size", f"must be a multiple of {num_heads}, got {inner}")
    fields.value("rope.dimension_sections")  # of images: the positions of text are one number
    return {
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": inner // num_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel", minimum=2),
        "layer_types": _linear_layers(fields, config["num_hidden_layers"]),
    }


def _linear_layers(fields: Fields, num_layers: int) -> list[str]:
    period = fields.integer("full_attention_interval", 4)
    stated = fields.value("attention.recurrent_layers")
    if stated is None:
        stated = [(index + 1) % period != 0 for index in range(num_layers)]
    if not isinstance(stated, list) or len(stated) < num_layers:
        raise fields.refuse(
            "attention.recurrent_layers", f"must say it for each of {num_layers} layers"
        )
    return ["linear_attention" if each else "full_attention" for each in stated[:num_layers]]


def qwen35_moe(fields: Fields, config: Config) -> Config:
    """Return the config's values of a mixture with Gated DeltaNet. Raises ModelError."""
    return qwen35(fields, config) | {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
    }


def qwen3_next(fields: Fields, config: Config) -> Config:
    """Return the config's values of Qwen 3 Next. Raises ModelError."""
    # llama.cpp's graph, which reads no keys for them
    return qwen35_moe(fields, config) | {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def lfm2(fields: Fields, config: Config) -> Config:
    """Return the config's values of short convolutions, and which layers have them.

    Layers with a convolution have 0 key heads. Raises ModelError.
    """
    num_layers, counts = config["num_hidden_layers"], fields.value(_KEY_HEADS)
    if not isinstance(counts, list):
        counts = [config["num_key_value_heads"]] * num_layers
    if len(counts) != num_layers:
        raise fields.refuse(_KEY_HEADS, f"must have {num_layers} entries, got {len(counts)}")
    return {
        "conv_L_cache": fields.integer("shortconv.l_cache", minimum=2),
        "conv_bias": False,
        "layer_types": ["full_attention" if each else "conv" for each in counts],
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted number
    }


def lfm2_moe(fields: Fields, config: Config) -> Config:
    """Return the config's values of a mixture with short convolutions. Raises ModelError."""
    gating = fields.integer("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise fields.refuse("expert_gating_func", f"must be {_SIGMOID} (sigmoid), got {gating}")
    return lfm2(fields, config) | {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "num_dense_layers": fields.integer("leading_dense_block_count", 0, minimum=0),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


class Order(NamedTuple):
    """The row and the column of a file's weight for each of the model's; None: the same."""

    rows_R: Rows | None = None
    columns_K: Rows | None = None

    @property
    def is_same(self) -> bool:
        return self.rows_R is None and self.columns_K is None


class DeltaSizes(NamedTuple):
    """The heads of a Gated DeltaNet."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "DeltaSizes":
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        return cls(*(config[f"linear_{name}"] for name in names))

    def order(self, name: str, *, are_tiled: bool) -> Order:
        """Return the order of a parameter of transformers; one that is joined counts as one.

        `are_tiled`: the converter has put the first value head of every key head first, then the
        second of every key head, and so on. Transformers has those of a key head together.
        """
        if name.endswith(".in_proj_qkvz.weight"):
            return Order(self._grouped_rows())
        if not are_tiled or self.num_heads == self.num_key_heads:
            return Order()
        heads_H = np.arange(self.num_heads).reshape(-1, self.num_key_heads).T.reshape(-1)
        values_R = (heads_H[:, None] * self.dim + np.arange(self.dim)).reshape(-1)
        num_before = 2 * self.num_key_heads * self.key_dim
        channels_R = np.concatenate([np.arange(num_before), num_before + values_R])
        orders = {
            **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), Order(heads_H)),
            **dict.fromkeys(("in_proj_qkv", "conv1d"), Order(channels_R)),
            "in_proj_z": Order(values_R),
            "out_proj": Order(columns_K=values_R),
        }
        part = name.partition(".linear_attn.")[2].removesuffix(".weight")
        return orders.get(part, Order())

    def _grouped_rows(self) -> Rows:
        """Return the rows of queries, keys, values and gates, for those of each key head."""
        num_keys, num_values = self.num_key_heads * self.key_dim, self.num_heads * self.dim
        sizes = (num_keys, num_keys, num_values, num_values)
        ends = np.cumsum(sizes)
        rows = [
            np.arange(end - size, end).reshape(self.num_key_heads, -1)
            for size, end in zip(sizes, ends, strict=True)
        ]
        return np.concatenate(rows, axis=1).reshape(-1)


def logs_of_rates(rates_H: "torch.Tensor") -> "torch.Tensor":
    """Return A_log in float32, from the file's -exp(A_log).

    Not every number is an exp of float32. Where several logarithms are near, the one whose exp is
    nearest to the file's number is taken, so that the rates of a converted model are its own.
    """
    import torch  # noqa: PLC0415

    near_H = (-rates_H).double().log().clamp(min=_LOWEST_LOG)
    step_H = near_H.abs().clamp(min=0.25) * 2.0**-24
    found_H = near_H.float()
    for steps in (-1, 1, -2, 2, -3, 3):
        other_H = (near_H + steps * step_H).float()
        is_nearer_H = (other_H.exp() + rates_H).abs() < (found_H.exp() + rates_H).abs()
        found_H = torch.where(is_nearer_H, other_H, found_H)
    return found_H
