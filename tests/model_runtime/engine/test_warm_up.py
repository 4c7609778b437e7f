"""The warm-up of a GPU's kernels, here under Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner, warm_up
from tests.doubles.engines import deployment_of, tiny_checkpoint
from tests.oracles.triton_attention import use_triton


@pytest.mark.parametrize(("page_size", "max_len"), [(4, 256), (16, 12)])
def test_a_warm_up_leaves_no_trace(
    page_size: int, max_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes to one page, and a sequence that gets this page later is answered as without."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    use_triton(monkeypatch)
    (tier, *_) = deployment_of(checkpoint).own_tiers
    config = EngineConfig(kv_cache_tokens=512, max_model_len=max_len, page_size=page_size)
    page, first_page = config.num_pages - 1, 0
    cold, warm = (build_runner(checkpoint, config, [tier.profile]) for _ in range(2))
    warm_up(warm, tier.profile, page, config)
    assert warm._tables.num_tables == 1
    for keys_or_values in warm._store.pages(0):
        assert not keys_or_values[:page].any()
        assert keys_or_values[page].any()
    table_id = warm.table_id(tier.profile)
    ids = list(range(page_size + 3))[:max_len]
    prompt = Span(ids, 0, [page, first_page], table_id, range(len(ids)))
    assert torch.equal(warm.run([prompt]), cold.run([prompt]))
