"""A recorded forward never waits for the device."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.paged_attention import STEP, AttentionCall
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from tests.checkpoints.tiny_models import tiny_model


class Nowhere:
    """An attention that returns empty numbers without reading."""

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Numbers on the `meta` device."""
        heads, num_tokens = call.query_1HTD.shape[1:3]
        return call.query_1HTD.new_empty(1, num_tokens, heads, call.value_1KTV.shape[-1])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3"])
def test_a_models_own_forward_asks_the_device_for_nothing(architecture: str) -> None:
    """Torch's `meta` device raises if a number is read, which would prevent a recording."""
    model = tiny_model(architecture)
    patch_model(model, read_native_rope(model))
    model.to("meta")
    ids_1T = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    rows_R = torch.zeros(3, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        told = model(
            input_ids=ids_1T,
            position_ids=ids_1T,
            use_cache=False,
            logits_to_keep=rows_R,
            **{STEP: Nowhere()},
        )
    assert told.logits.shape[:2] == (1, 3)
    with pytest.raises((RuntimeError, NotImplementedError)):
        told.logits.sum().item()
