"""The memory of one rank, in weights and cache, and what a load takes on the way."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.packed_product import PackedProduct
from ropewalk.model_runtime.loading import checkpoint
from ropewalk.model_runtime.parallel.cut import MappedLinear
from ropewalk.model_runtime.parallel.packed_cut import GatheredProduct
from ropewalk.model_runtime.parallel.ranks import Ranks
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.tokens import byte_tokenizer_fast
from tests.model_runtime.parallel.divided_models import divided, overrides_of, whole
from tests.model_runtime.parallel.test_same_bits import compare

CONFIG = EngineConfig(kv_cache_tokens=1024, max_model_len=128, page_size=16)


def products_of(model: nn.Module) -> list[PackedProduct]:
    """The packed products of a model, each once, without the gathers around them."""
    found: dict[int, PackedProduct] = {}
    for module in model.modules():
        names = ("product", "gate_up", "down")
        for value in (getattr(module, name, None) for name in names):
            product: Any = value._own if isinstance(value, GatheredProduct) else value
            if isinstance(product, PackedProduct):
                found[id(product)] = product
    return list(found.values())


def held_bytes(model: nn.Module) -> int:
    """The bytes of all weights that a model holds, packed or not."""
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta]
    plain = sum(each.nbytes for each in tensors)
    for product in products_of(model):
        panels = product._panels
        num_weights = product.in_features * product.out_features
        plain += 4 * num_weights if panels is None else panels.packed_Q.nbytes
    return plain


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_rank_holds_its_share_and_the_embedding(ranks: Ranks) -> None:
    """Its weights are at most 1/N of the divided ones, the embedding and 4 %.

    A rank's keys and values have 32 outputs here, in panels of 64.
    """
    alone = whole("llama", is_wide=True)
    shared = divided(ranks, "llama", is_wide=True)
    embedding = alone.model.get_input_embeddings().weight.nbytes
    total, held = held_bytes(alone.model), held_bytes(shared.model)
    assert held <= 1.04 * ((total - embedding) / ranks.size + embedding)
    assert held == pytest.approx(4 * ranks.plan.num_rank_parameters, rel=0.04)
    assert not any(isinstance(each, MappedLinear) for each in shared.model.modules())


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_rank_holds_its_share_of_the_cache(ranks: Ranks) -> None:
    """A rank has the keys and values of its own heads only."""
    alone = build_runner(whole("llama"), CONFIG)
    mirrored = build_runner(divided(ranks, "llama"), CONFIG, make=ranks.runner)
    assert mirrored._store.num_bytes * ranks.size == alone._store.num_bytes


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_larger_served_type_is_made_from_each_part(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of bfloat16 are read as they are, so no rank holds a whole model in float32."""
    model = in_dtype(tiny_model("llama", **overrides_of("llama")), torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path)
    byte_tokenizer_fast().save_pretrained(tmp_path)
    read, original = [], checkpoint._load_model

    def load_model(outline: Any, dtype: torch.dtype, **options: Any) -> Any:
        read.append(dtype)
        return original(outline, dtype, **options)

    monkeypatch.setattr(checkpoint, "_load_model", load_model)
    options = {"dtype": "float32", "device": "cpu"}
    load = partial(checkpoint.load_checkpoint, tmp_path, **options)
    shared = ranks.load(load, tmp_path, **options, trust_remote_code=False)
    assert read == [torch.bfloat16]
    compare(ranks, load(), shared)
