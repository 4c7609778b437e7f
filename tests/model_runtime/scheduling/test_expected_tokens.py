"""Tokens that may come take no room."""

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.rope import native_rope

DEPLOYMENT = make_deployment("m", native_rope({"max_position_embeddings": 256, "head_dim": 8}))
PAGE = 8


def test_no_page_is_taken_for_tokens_that_may_come() -> None:
    """As many requests run with the largest max_tokens as with a small one."""
    config = EngineConfig(
        kv_cache_tokens=8 * PAGE,
        max_model_len=1024,
        page_size=PAGE,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    for max_tokens in (4, 1024 - PAGE + 1):
        plan = Scheduler(config)
        tier_choice = DEPLOYMENT.choose(RopeRequest(), PAGE, max_tokens)
        for number in range(8):
            sampling = SamplingParams(max_tokens=max_tokens)
            plan.add(Sequence(Request("r", (number,) * PAGE, sampling, tier_choice)))
        assert len(plan.schedule().chunks) == 8
        assert plan.pages.pool.num_used == 8
