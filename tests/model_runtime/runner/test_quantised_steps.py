"""Steps over quantised pages on a device that runs them later."""

import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.doubles.deferred_runner import device_of
from tests.doubles.random_workloads import check, serve, workload
from tests.oracles.draft_adversary import Counted, tell, use_adversary
from tests.oracles.quantised_reads import use_small_groups

PAGE = 32
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
FEW = {"page_size": PAGE, "kv_cache_tokens": 9 * PAGE, "max_num_batched_tokens": 70}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_groups(monkeypatch)


def test_tail_pages_are_right_one_step_ahead_of_the_host(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end, are aborted and preempted while a later step of theirs is launched.

    Their tail pages are others' by then. Rows of drafts share one.
    """
    adversary, counted, num_followed = use_adversary(monkeypatch), Counted(), 0
    monkeypatch.setattr(adversary, "share_silent", 0.7)
    limits = {**FEW, "kv_cache_dtype": "k8v4"}
    for seed in range(4):
        work = workload(llama_checkpoint, seed)
        expected, _ = serve(llama_checkpoint, work, is_ahead=False, **limits)
        results = expected.results()
        requests = [each for arrived in work.arrivals.values() for each in arrived]
        tell(adversary, seed, 0.8, [(each, results[each.request_id]) for each in requests])
        answers, core = serve(
            llama_checkpoint, work, is_ahead=True, max_draft_tokens=7, observer=counted, **limits
        )
        num_followed += device_of(core).num_followed
        check(answers, expected)
    assert num_followed > 30, "the engine was hardly ever ahead"
    assert 20 < counted.num_accepted < counted.num_drafted
