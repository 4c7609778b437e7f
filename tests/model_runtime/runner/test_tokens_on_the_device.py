"""Launched steps take tokens that only the device has, in captured steps and in others.

Without a GPU a recording is the forward called again, and kernels are interpreted.
"""

from collections.abc import Sequence

import pytest

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner import model_runner, sampler
from ropewalk.model_runtime.runner.sampler import SamplingRow
from tests.doubles.engines import deployment_of
from tests.doubles.recorded_runners import Again, capture, runner_of
from tests.oracles.triton_attention import interpreted_checkpoint


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint served by the GPU's attention on the CPU; a Llama of one layer."""
    return interpreted_checkpoint(request, monkeypatch)


@pytest.mark.parametrize(("temperature", "has_kernels"), [(0.0, False), (0.9, True)])
def test_recorded_steps_pass_their_tokens_on(
    checkpoint: Checkpoint,
    temperature: float,
    has_kernels: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second step is launched before the first is read, and one sequence has ended by then.

    With a GPU's kernels, the draw is replayed behind the step.
    """
    for module in (sampler, model_runner):
        monkeypatch.setattr(module, "has_gpu_kernels", lambda _: has_kernels)
    record = Again()
    profile = deployment_of(checkpoint).own_tiers[0].profile
    plain = runner_of(checkpoint, None, [profile])
    recorded = runner_of(checkpoint, None, [profile])
    capture(recorded, record, max_rows=3)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]

    def rows(places: Sequence[int], num_generated: int) -> list[SamplingRow]:
        return [SamplingRow(params[at], num_generated, frozenset()) for at in places]

    def spans(places: Sequence[int], token_ids: Sequence[int], position: int) -> list[Span]:
        return [
            Span([token_id], position, [at], 0, range(1))
            for at, token_id in zip(places, token_ids, strict=True)
        ]

    first = recorded.launch(spans((0, 1, 2), (5, 6, 7), 0), rows((0, 1, 2), 1), None)
    second = recorded.launch(spans((0, 2), (0, 0), 1), rows((0, 2), 2), (first, (0, 2)))
    third = recorded.launch(spans((0, 2), (0, 0), 2), rows((0, 2), 3), (second, (0, 1)))
    got = [each.read() for each in (first, second, third)]
    assert record.num_replayed == (6 if has_kernels else 3)
    one = plain.launch(spans((0, 1, 2), (5, 6, 7), 0), rows((0, 1, 2), 1), None).read()
    known = [one[1][0], one[1][2]]
    two = plain.launch(spans((0, 2), known, 1), rows((0, 2), 2), None).read()
    three = plain.launch(spans((0, 2), two[1], 2), rows((0, 2), 3), None).read()
    assert got == [one, two, three]
    assert len({*one[1], *two[1], *three[1]}) > 2, "the tokens do not differ"


@pytest.mark.parametrize("is_recorded", [True, False])
def test_prompts_are_beside_tokens_that_only_the_device_has(
    checkpoint: Checkpoint, *, is_recorded: bool
) -> None:
    """Two prompts end, and are decoded in another order beside a third one, in two chunks."""
    record = Again()
    profile = deployment_of(checkpoint).own_tiers[0].profile
    plain = runner_of(checkpoint, None, [profile])
    runner = runner_of(checkpoint, None, [profile])
    if is_recorded:
        capture(runner, record, max_rows=3, max_prompt_rows=11)
    rows = [SamplingRow(SamplingParams(temperature=0.0), 1, frozenset())] * 3

    def steps(first: Sequence[int], second: Sequence[int]) -> list[list[Span]]:
        last = range(8, 9)
        one, other, third = list(range(40, 43)), list(range(60, 63)), list(range(80, 89))
        begun = [Span(each, 0, [at], 0, range(2, 3)) for at, each in enumerate((one, other))]
        middle = [Span([token], 3, [1 - at], 0, range(1)) for at, token in enumerate(first)]
        ended = [Span([token], 4, [at], 0, range(1)) for at, token in enumerate(second)]
        chunks = Span(third, 0, [2], 0, ()), Span(third, 9, [2, 3], 0, last)
        return [begun, [*middle, chunks[0]], [*ended, chunks[1]]]

    unknown = steps((0, 0), (0, 0))
    begun = runner.launch(unknown[0], rows[:2], None)
    middle = runner.launch(unknown[1], rows[:2], (begun, (1, 0)))
    ended = runner.launch(unknown[2], rows, (middle, (1, 0)))
    got = [each.read() for each in (begun, middle, ended)]
    one = plain.launch(unknown[0], rows[:2], None).read()
    two = plain.launch(steps(one[1][::-1], (0, 0))[1], rows[:2], None).read()
    three = plain.launch(steps((0, 0), two[1][::-1])[2], rows, None).read()
    assert got == [one, two, three]
    assert len({*one[1], *two[1], *three[1]}) > 4, "the tokens do not differ"
    assert record.num_replayed == 3 * is_recorded
