"""The length that is there chooses the tables: not max_tokens, and not what is cached."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.rope import POLICIES, Policy
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, request

YARN = {"rope_type": "yarn", "factor": 4.0}
LONGEST = 256  # four times L


@dataclass(frozen=True)
class Case:
    """A request, and those that came before it."""

    num_prompt: int
    policy: Policy
    others: list[tuple[int, Policy]]
    few: int  # max_tokens of its shorter form
    temperature: float


CASES = st.builds(
    Case,
    num_prompt=st.integers(1, LONGEST),
    policy=st.sampled_from(POLICIES),
    others=st.lists(st.tuples(st.integers(1, LONGEST), st.sampled_from(POLICIES)), max_size=3),
    few=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.8]),
)


@pytest.mark.parametrize("kind", ["auto", "bfloat16"])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_tokens_depend_on_the_tokens_before_them_alone(
    engines: EngineFactory, llama_checkpoint: Checkpoint, kind: str, case: Case
) -> None:
    """A larger max_tokens only goes on; prompts of other tiers and policies change no bit."""
    engine = engines.over(llama_checkpoint, page_size=16, kv_cache_dtype=kind)
    text = [(11 * at + at // 7) % (VOCAB_SIZE - 2) + 2 for at in range(LONGEST)]

    def asked(length: int, policy: Policy, max_tokens: int, salt: str = "") -> Result:
        deployment = deployment_of(llama_checkpoint, rope_scaling=YARN, rope_policy=policy)
        options = {"temperature": case.temperature, "seed": 5, "ignore_eos": True, "logprobs": 1}
        made = request(deployment, text[:length], None, salt, max_tokens=max_tokens, **options)
        return answer(engine, made)[0]

    most = min(LONGEST - case.num_prompt + 1, 80)
    few = min(case.few, most)
    for length, other in case.others:
        asked(length, other, 1)
    whole = asked(case.num_prompt, case.policy, most)
    short = asked(case.num_prompt, case.policy, few)
    alone = asked(case.num_prompt, case.policy, most, salt="of its own")
    assert whole == alone
    assert short.token_ids == whole.token_ids[:few]
    assert short.logprobs == whole.logprobs[:few]
