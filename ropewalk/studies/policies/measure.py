"""Sequences that change tier during decode, under each policy for the keys cached before.

The server's own engine runs them, with its scheduler, pages and kernels. The decoded
tokens do not come from the model: a window's own tokens are forced one at a time, and the engine
reports their probabilities. The model generates only the answer to the question at the end.

| policy | cached keys after a tier change |
|---|---|
| fixed | no tier change: the last tier's table is used from the start |
| grow | read under the new table; hidden states of old |
| grow-exact | computed again under the new table |
| stale | as they were rotated when written (`stale_keys.py`), for comparison only |

A method's tiers double: L, 2 L, 4 L. With a step after the name (`dynamic@1`), each tier beyond L
covers that number of tokens. This is like engines with a table that follows the length token by
token.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Output, Request, SamplingParams
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.text.grammar import Constraint
from ropewalk.rope import NativeRope, RopeConfigError, choose_tier
from ropewalk.studies.harness.eval_run import EvalError
from ropewalk.studies.policies.stale_keys import StaleKeyRunner
from ropewalk.studies.policies.windows import CrossingWindow, Shape

CrossingPolicy = Literal["fixed", "grow", "grow-exact", "stale"]
CROSSING_POLICIES: tuple[CrossingPolicy, ...] = get_args(CrossingPolicy)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one window under one policy."""

    nll: tuple[float, ...]  # of each scored token, nats
    found: bool  # the answer begins with the needle's value
    num_rescales: int  # tier changes that happened
    decode_s: float  # from the first decoded token to the last
    step_s: float  # median time between two tokens, without tier changes
    crossing_s: tuple[float, ...]  # the time between two tokens at each tier change


class ForcedTokens(Constraint):
    """A constraint that forces the tokens of a list in order, and then allows any token."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids = token_ids
        self._num_fed = 0
        self._any_token = b"\xff" * -(-vocab_size // 8)
        self.allowed = b""

    def look(self) -> bool:
        """Set the mask for the next token; return True, because there always is one."""
        self.allowed = self._any_token
        if self._num_fed < len(self._token_ids):
            token_id = self._token_ids[self._num_fed]
            self.allowed = bytes(token_id // 8) + bytes([1 << token_id % 8])
        return True

    def advance(self, token_id: int) -> bool:  # noqa: ARG002  # it is the allowed one
        """Advance to the next token; return False, because this is never the end."""
        self._num_fed += 1
        return False


@dataclass(slots=True)
class _Recording:
    """The engine's outputs for one window."""

    window: CrossingWindow
    times_s: list[float] = field(default_factory=list)  # of each token
    rescales: list[int] = field(default_factory=list)  # so far, at each token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None

    def listen(self, output: Output) -> None:
        """Record an output; the engine calls this with each token."""
        self.times_s.append(time.monotonic())
        self.rescales.append(output.num_rescales)
        self.token_ids += output.token_ids
        self.logprobs += [each.logprob for each in output.logprobs]
        if output.finish_reason not in (None, FinishReason.LENGTH):
            self.error = output.error or str(output.finish_reason)


def crossing_deployment(
    native: NativeRope, method: str, policy: CrossingPolicy, shape: Shape, longest: int
) -> Deployment:
    """Build a deployment with tiers from L up to `longest` tokens. Raises EvalError."""
    rope_type, _, step = method.partition("@")
    block: dict[str, object] = {
        "rope_type": rope_type,
        "original_max_position_embeddings": shape.native_len,
    }
    if rope_type == "dynamic":
        block["factor"] = 1.0  # the plain form: the base follows the length alone
    ceilings = [shape.native_len]
    while ceilings[-1] < longest:
        ceilings.append(ceilings[-1] + (int(step) if step else ceilings[-1]))
    try:
        return make_deployment(
            "crossing",
            native,
            DeploymentOptions(
                rope_scaling=block,
                # A request asks for the table of `fixed`, that of its own end.
                rope_policy="grow-exact" if policy == "grow-exact" else "grow",
                rope_tiers=[ceiling / shape.native_len for ceiling in ceilings],
            ),
        )
    except RopeConfigError as error:
        raise EvalError(f"method {method}: {error}") from error


def policies_of(method: str) -> tuple[CrossingPolicy, ...]:
    """Return all policies, without `grow-exact` for a method with a step.

    There, `grow-exact` would compute all keys again at almost every token.
    """
    return tuple(each for each in CROSSING_POLICIES if each != "grow-exact" or "@" not in method)


def run_windows(
    checkpoint: Checkpoint,
    method: str,
    policy: CrossingPolicy,
    windows: Sequence[CrossingWindow],
    *,
    page_size: int = 16,
    max_num_batched_tokens: int = 512,
) -> list[Outcome]:
    """Decode windows of one shape together, in their own engine and cache.

    Raises EvalError, or ModelError if there is no memory or a step fails.
    """
    shape = windows[0].shape
    longest = max(window.num_tokens for window in windows)
    deployment = crossing_deployment(checkpoint.native, method, policy, shape, longest)
    num_pages = sum(-(-window.num_tokens // page_size) for window in windows)
    config = EngineConfig(
        kv_cache_tokens=num_pages * page_size,
        max_model_len=longest,
        page_size=page_size,
        max_num_seqs=len(windows),
        max_num_batched_tokens=max(max_num_batched_tokens, len(windows)),
    )
    # Built now, so that no tier change waits for its table.
    profiles = [tier.profile for tier in deployment.own_tiers]
    make = StaleKeyRunner if policy == "stale" else ModelRunner
    core = EngineCore(build_runner(checkpoint, config, profiles, make), config, Observer())
    recordings = [_Recording(window) for window in windows]
    for number, recording in enumerate(recordings):
        core.add(_live(checkpoint, deployment, policy, recording, number))
    while not core.is_idle:
        core.step()
    return [_outcome(checkpoint, deployment, policy, each) for each in recordings]


def _live(
    checkpoint: Checkpoint,
    deployment: Deployment,
    policy: CrossingPolicy,
    recording: _Recording,
    number: int,
) -> RequestState:
    window = recording.window
    max_tokens = len(window.forced_ids) + window.num_answer_tokens
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    asked = RopeRequest()
    if policy == "fixed":
        last = choose_tier(deployment.own_tiers, window.num_tokens - 1, window.num_tokens - 1)
        assert last is not None
        asked = RopeRequest(policy="fixed", factor=last.factor)
    tier_choice = deployment.choose(asked, len(window.prompt_ids), max_tokens)
    # Each window has its own salt, so that it does not share pages with another.
    request = Request(f"window-{number}", window.prompt_ids, params, tier_choice, str(number))
    forced = ForcedTokens(window.forced_ids, checkpoint.vocab_size)
    return RequestState.of(request, checkpoint.tokenizer, frozenset(), recording.listen, forced)


def _outcome(
    checkpoint: Checkpoint, deployment: Deployment, policy: CrossingPolicy, recording: _Recording
) -> Outcome:
    window = recording.window
    if recording.error is not None:
        raise ModelError(f"the engine ended window {window.needle.key}: {recording.error}")
    num_forced = len(window.forced_ids)
    assert tuple(recording.token_ids[:num_forced]) == window.forced_ids
    # The last token is never read back, so it causes no tier change.
    passed = [each for each in deployment.own_tiers if each.ceiling < window.num_tokens - 1]
    expected = 0 if policy == "fixed" else len(passed)
    assert recording.rescales[-1] == expected, "a crossing did not happen"
    answer = checkpoint.tokenizer.decode(recording.token_ids[num_forced:])
    gaps = [later - earlier for earlier, later in pairwise(recording.times_s)]
    crosses = [later > earlier for earlier, later in pairwise(recording.rescales)]
    ordinary = [gap for gap, is_crossing in zip(gaps, crosses, strict=True) if not is_crossing]
    return Outcome(
        nll=tuple(-each for each in recording.logprobs[window.scored]),
        found=answer.lstrip().startswith(window.needle.value),
        num_rescales=recording.rescales[-1],
        decode_s=recording.times_s[-1] - recording.times_s[0],
        step_s=statistics.median(ordinary),
        crossing_s=tuple(gap for gap, each in zip(gaps, crosses, strict=True) if each),
    )
