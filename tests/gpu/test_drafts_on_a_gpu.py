"""Drafts verified on a GPU: `make gpu-check`."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.runner.cuda_graphs import MOST_RECORDED, recorded_sizes
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.doubles.engines import EngineFactory, answer, deployment_of, num_same, request
from tests.oracles.draft_adversary import Counted, tell, use_adversary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_drafts_are_rows_of_recorded_steps(
    engines: EngineFactory, monkeypatch: pytest.MonkeyPatch, *, enforce_eager: bool
) -> None:
    """Right and wrong drafts beside each other; answers part at near ties only."""
    checkpoint = load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cuda")
    deployment = deployment_of(checkpoint)
    asked = [
        request(
            deployment,
            [(7 * at + number) % 900 + 5 for at in range(40 + 60 * number)],
            max_tokens=60,
            ignore_eos=True,
            **({"logprobs": 0} if number == 2 else {}),
        )
        for number in range(3)
    ]
    plain = answer(engines.over(checkpoint, enforce_eager=enforce_eager), *asked)
    adversary, counted = use_adversary(monkeypatch), Counted()
    tell(adversary, 1, 0.8, list(zip(asked, plain, strict=True)))
    engine = engines.over(
        checkpoint,
        observer=counted,
        max_num_seqs=3,
        max_draft_tokens=7,
        enforce_eager=enforce_eager,
    )
    drafted = answer(engine, *asked)
    engine.stop()  # a step is counted after its last output
    runner = engine._core._runner
    assert isinstance(runner, ModelRunner)
    if not enforce_eager:
        assert runner._graphs is not None
        assert set(runner._graphs._recorded) <= set(recorded_sizes(24, MOST_RECORDED))
        assert max(runner._graphs._recorded) > 3
    assert 20 < counted.num_accepted < counted.num_drafted
    for got, expected in zip(drafted, plain, strict=True):
        assert len(got.token_ids) == 60
        same = num_same(got.token_ids, expected.token_ids)
        assert same >= 1
        ours, theirs = (
            torch.tensor([entry.logprob for entry in each.logprobs[:same]])
            for each in (got, expected)
        )
        assert not len(ours) or float((ours - theirs).abs().max()) < 1e-3
