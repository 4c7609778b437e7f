"""The step with the most prompts, which is measured beside the largest one."""

import pytest

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.memory.memory_profile import crowded_step


@pytest.mark.parametrize(
    ("tokens", "seqs", "context", "num_tokens"),
    [
        (150, 5, 200, [30] * 5),
        (150, 100, 200, [2] * 75),
        (150, 1, 200, [150]),
        (150, 5, 20, [20] * 5),
        (1, 5, 200, [1]),
    ],
)
def test_the_crowded_step_has_the_most_prompts(
    tokens: int, seqs: int, context: int, num_tokens: list[int]
) -> None:
    """Every prompt is at the end of the longest context, so the most keys are gathered."""
    config = EngineConfig(
        kv_cache_tokens=0,
        max_model_len=context,
        page_size=16,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
    )
    spans = crowded_step(config, 3, 7)
    assert [len(span.token_ids) for span in spans] == num_tokens
    for span in spans:
        assert span.first_position + len(span.token_ids) == context
        assert span.logit_rows == range(len(span.token_ids) - 1, len(span.token_ids))
        assert len(span.pages) == -(-context // 16)
        assert span.table_id == 3
        assert max(span.token_ids) < 7
