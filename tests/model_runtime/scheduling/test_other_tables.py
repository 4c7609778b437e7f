"""Prompt tokens that the prefix cache has under other tables only."""

from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from tests.doubles.engines import EngineFactory, deployment_of, request

YARN = {"rope_type": "yarn", "factor": 4.0}
PROMPT = [(7 * at) % 190 for at in range(150)]  # L is 64


class Missed(Observer):
    """An observer that keeps the numbers of missed tokens."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def missed(self, request: Request, num_tokens: int) -> None:
        """Keep one number."""
        self.found.append(num_tokens)


def test_tokens_of_other_tiers_methods_and_policies_are_counted(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Under `by_position` a prompt of any length finds all, and another table finds its own."""
    missed = Missed()
    engine = engines.over(llama_checkpoint, page_size=16, observer=missed)
    default, grow, linear = (
        deployment_of(llama_checkpoint, rope_scaling=scaling, rope_policy=policy)
        for scaling, policy in (
            (YARN, "by_position"),
            (YARN, "grow"),
            ({**YARN, "rope_type": "linear"}, "by_position"),
        )
    )

    def asked(deployment: object, num_tokens: int, **options: object) -> int:
        prompt = request(deployment, PROMPT[:num_tokens], max_tokens=1, **options)  # type: ignore[arg-type]
        (outputs,) = engine.generate([prompt])
        return outputs[-1].num_cached_tokens

    for num_tokens in (50, 100, 150, 70):
        asked(default, num_tokens)
    assert missed.found == []
    # Its table is that of 128 tokens for the whole prompt, so it finds nothing of its own.
    assert asked(grow, 120) == 0
    assert missed.found == [112]
    # The first L tokens are native under every method.
    assert asked(linear, 150) == 64
    assert missed.found == [112, 80]
    # A prompt whose logprobs are asked for reads no page, and misses none.
    asked(grow, 120, prompt_logprobs=0)
    assert asked(grow, 120) == 112
    assert missed.found == [112, 80]
