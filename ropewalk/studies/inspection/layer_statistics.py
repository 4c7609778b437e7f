"""The statistics of a layer's heads, without what measures them.

The report and the plot import this module, and a report without heads needs no transformers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk.rope.decay import Moments

if TYPE_CHECKING:
    from ropewalk.model_runtime.attention.paged_attention import LayerPlan


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of one layer's heads on the sample, and the settings of its logits."""

    query: Moments  # of H heads
    key: Moments  # of K heads
    plan: "LayerPlan"
    scaling: float  # multiplies every logit
    sliding_window: int | None  # keys that a query sees, itself included; None: all

    @property
    def key_head_H(self) -> Tensor:
        """Return the key head of each query head; consecutive query heads share one."""
        num_query_heads, num_key_heads = len(self.query.mean_HD), len(self.key.mean_HD)
        return torch.arange(num_query_heads) // (num_query_heads // num_key_heads)

    @property
    def key_by_query_head(self) -> Moments:
        """Return the keys' moments, with a row for each query head."""
        head_H = self.key_head_H
        return Moments(self.key.mean_HD[head_H], self.key.covariance_HDD[head_H])
