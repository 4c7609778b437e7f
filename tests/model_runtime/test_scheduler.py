"""Which tokens are computed next; no model needed."""

import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.config import EngineConfig
from model_runtime.deployment import RopeRequest, make_deployment
from model_runtime.request import Request, SamplingParams
from model_runtime.scheduler import Chunk, Scheduler
from model_runtime.sequence import Sequence
from rope import native_rope

DEPLOYMENT = make_deployment("m", native_rope({"max_position_embeddings": 256, "head_dim": 8}))


def sequence(num_prompt_tokens: int, max_tokens: int = 4, **params: Any) -> Sequence:
    """A sequence with that many prompt tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    placement = DEPLOYMENT.place(RopeRequest(), num_prompt_tokens, max_tokens)
    return Sequence(Request("r", tuple([0] * num_prompt_tokens), sampling, placement))


def scheduler(**config: Any) -> Scheduler:
    """Small limits."""
    numbers = {
        "kv_cache_tokens": 160,
        "max_model_len": 1024,
        "page_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        **config,
    }
    return Scheduler(EngineConfig(**numbers))


def computed(chunks: list[Chunk]) -> None:
    """What the engine does after a step."""
    for chunk in chunks:
        last = chunk.is_last
        chunk.sequence.num_computed += chunk.num_tokens
        if last:
            chunk.sequence.token_ids.append(0)


def sizes(chunks: list[Chunk]) -> list[int]:
    """Tokens per chunk."""
    return [chunk.num_tokens for chunk in chunks]


def test_a_long_prompt_is_read_in_chunks() -> None:
    """of what the budget allows"""
    plan = scheduler()
    plan.add(sequence(40))
    seen = []
    for _ in range(4):
        chunks = plan.schedule()
        seen.append(sizes(chunks))
        computed(chunks)
    assert seen == [[16], [16], [8], [1]]


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    """a sequence that decodes never waits for a prompt"""
    plan = scheduler()
    short, long = sequence(3), sequence(60)
    plan.add(short)
    computed(plan.schedule())
    plan.add(long)
    chunks = plan.schedule()
    assert [(chunk.sequence, chunk.num_tokens) for chunk in chunks] == [(short, 1), (long, 15)]


def test_waiting_requests_start_in_order_and_are_not_overtaken() -> None:
    """the first takes its pages as soon as they are back"""
    plan = scheduler()
    first, big, small = sequence(90), sequence(100), sequence(5)
    for each in (first, big, small):
        plan.add(each)
    plan.schedule()
    assert plan.running == [first]
    assert list(plan.waiting) == [big, small]
    plan.remove(first)
    plan.schedule()
    assert plan.running == [big, small]


def test_no_more_sequences_run_than_allowed() -> None:
    """max_num_seqs"""
    plan = scheduler()
    for _ in range(6):
        plan.add(sequence(3))
    plan.schedule()
    assert (len(plan.running), len(plan.waiting)) == (4, 2)


def test_rows_of_prompt_logprobs_are_bounded_per_step() -> None:
    """each is as wide as the vocabulary"""
    plan = scheduler(max_num_logit_rows=6)
    plan.add(sequence(20, prompt_logprobs=1))
    plan.add(sequence(20))
    assert sizes(plan.schedule()) == [6, 10]


@settings(max_examples=200)
@given(st.data())
def test_every_request_is_finished_and_every_page_comes_back(data: st.DataObject) -> None:
    """arrivals, steps and aborts in any order"""
    plan = scheduler()
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "step", "step", "abort"]))
        if action == "add":
            each = sequence(data.draw(st.integers(1, 100)), data.draw(st.integers(0, 20)))
            plan.add(each)
            live.append(each)
        elif action == "abort" and live:
            plan.remove(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            step(plan, live)
        plan.check_integrity()
    for _ in range(5000):
        if not live:
            break
        assert step(plan, live)
    assert not live
    assert plan.pool.num_used == 0


def step(plan: Scheduler, live: list[Sequence]) -> bool:
    """One step; ends what has all its tokens. False when nothing was scheduled."""
    chunks = plan.schedule()
    assert sum(sizes(chunks)) <= 16
    for chunk in chunks:
        end = chunk.first + chunk.num_tokens
        assert end <= len(chunk.sequence.pages) * 8
    computed(chunks)
    for chunk in chunks:
        each = chunk.sequence
        if each.num_generated >= max(1, each.request.sampling.max_tokens):
            plan.remove(each)
            live.remove(each)
    return bool(chunks)


def test_scheduler_and_page_pool_know_no_torch() -> None:
    """deciding is plain Python"""
    import subprocess

    # rope's package imports torch, so look at what the two files themselves import.
    code = (
        "import ast, sys; names = {n.name if isinstance(n, ast.alias) else n for f in sys.argv[1:] "
        "for node in ast.walk(ast.parse(open(f).read())) "
        "for n in ([node.module] if isinstance(node, ast.ImportFrom) else "
        "node.names if isinstance(node, ast.Import) else [])}; sys.exit('torch' in names)"
    )
    files = ["model_runtime/scheduler.py", "model_runtime/page_pool.py"]
    assert subprocess.run([sys.executable, "-c", code, *files], check=False).returncode == 0
