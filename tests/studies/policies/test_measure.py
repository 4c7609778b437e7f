"""Stale keys, grow, grow-exact and fixed across tiers, against transformers' own forward."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.server.corpus.held_out import Document
from ropewalk.server.corpus.needles import FORMS, Needle
from ropewalk.studies.harness.eval_run import EvalError
from ropewalk.studies.policies.measure import CrossingPolicy, Outcome, run_windows
from ropewalk.studies.policies.windows import (
    CrossingSource,
    CrossingWindow,
    Shape,
    draw_sources,
    lay_out,
)
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.engines import checkpoint_of

L = 64
NEEDLE = Needle(FORMS[0], "KEY_1", "12345")


def window_of(
    num_crossings: int, *, lead_tokens: int = 6, scored_tokens: int = 20
) -> CrossingWindow:
    """A window of meaningless tokens; two more are generated at the end."""
    shape = Shape(L, num_crossings, lead_tokens, scored_tokens)
    tokens = [(7 * at * at + 3 * at) % VOCAB_SIZE for at in range(shape.question_at)]
    prompt, forced = tokens[: shape.prompt_len], tokens[shape.prompt_len :]
    return CrossingWindow(shape, tuple(prompt), tuple(forced), NEEDLE, num_answer_tokens=2)


def table_of(model: PreTrainedModel, method: str, multiple: float, length: int) -> Any:
    """Cosines and sines [1, T, D] of a tier from transformers, attention factor included."""
    config = type(model.config).from_dict(model.config.to_dict())
    if multiple > 1:
        config.rope_parameters = {
            "rope_theta": model.config.rope_parameters["rope_theta"],
            "rope_type": method,
            "factor": float(multiple),
            **({"original_max_position_embeddings": L} if method == "yarn" else {}),
        }
    rotary = type(model.model.rotary_emb)(config)
    return rotary(torch.zeros(1, 1, 1), torch.arange(length)[None])


def logprobs_by_row(
    model: PreTrainedModel, method: str, tokens: list[int], multiple_of_row: Sequence[float]
) -> torch.Tensor:
    """transformers' forward in which each position is rotated by a table of its own.

    That is what stale keys are: a row's query and key are turned when the row is computed.
    """
    tables = {
        multiple: table_of(model, method, multiple, len(tokens))
        for multiple in set(multiple_of_row)
    }
    cos, sin = (
        torch.stack([tables[each][which][0, at] for at, each in enumerate(multiple_of_row)])[None]
        for which in (0, 1)
    )
    mixed = copy.deepcopy(model)
    mixed.model.rotary_emb.forward = lambda *_, **__: (cos, sin)
    with torch.inference_mode():
        logits: torch.Tensor = mixed(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


def tier_at(position: int) -> int:
    """The multiple of L in force when a position is computed."""
    return next(multiple for multiple in (1, 2, 4, 8) if position < multiple * L)


def expected_nll(logprobs: torch.Tensor, window: CrossingWindow) -> list[float]:
    """The negative log-likelihood of each scored token, from the row before it."""
    shape, tokens = window.shape, [*window.prompt_ids, *window.forced_ids]
    scored = range(shape.first_scored, shape.first_scored + shape.scored_tokens)
    return [-float(logprobs[at - 1, tokens[at]]) for at in scored]


def test_a_tier_every_few_tokens_rotates_each_row_by_its_own_length(
    pair: tuple[PreTrainedModel, Checkpoint],
) -> None:
    """The factor of stale keys follows the length; transformers' linear tables are compared."""
    untouched, checkpoint = pair
    window = window_of(1)
    tokens = [*window.prompt_ids, *window.forced_ids]
    rows = [max(1.0, -(-(at + 1 - L) // 4) * 4 / L + 1) for at in range(len(tokens))]
    assert (rows[L - 1], rows[L], rows[L + 3], rows[L + 4]) == (1, 68 / 64, 68 / 64, 72 / 64)
    expected = expected_nll(logprobs_by_row(untouched, "linear", tokens, rows), window)
    assert outcome(checkpoint, "stale", window, "linear@4").nll == pytest.approx(expected, abs=1e-4)


def outcome(
    checkpoint: Checkpoint, policy: CrossingPolicy, window: CrossingWindow, method: str = "yarn"
) -> Outcome:
    """The result of one window, run alone."""
    return run_windows(checkpoint, method, policy, [window])[0]


@pytest.fixture(scope="module", params=["llama", "cohere"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Checkpoint]:
    """A model under transformers and the same one taken over; cohere's pairs are interleaved."""
    untouched = tiny_model(request.param)
    untouched.set_attn_implementation("eager")
    return untouched, checkpoint_of(tiny_model(request.param))


@pytest.mark.sampled
@pytest.mark.parametrize("num_crossings", [1, 2])
@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_stale_keys_equal_a_forward_whose_rows_were_rotated_at_their_own_time(
    pair: tuple[PreTrainedModel, Checkpoint], num_crossings: int, method: str
) -> None:
    """Four layers agree within 1e-4; each row has yarn's attention factor of its time."""
    untouched, checkpoint = pair
    window = window_of(num_crossings)
    tokens = [*window.prompt_ids, *window.forced_ids]
    rows = [tier_at(at) for at in range(len(tokens))]
    assert len(set(rows)) == num_crossings + 1
    expected = expected_nll(logprobs_by_row(untouched, method, tokens, rows), window)
    found = outcome(checkpoint, "stale", window, method)
    assert found.nll == pytest.approx(expected, abs=1e-4)
    assert found.num_rescales == len(found.crossing_s) == num_crossings


@pytest.mark.parametrize("policy", ["fixed", "grow-exact"])
def test_fixed_and_grow_exact_equal_a_forward_under_the_last_table(
    pair: tuple[PreTrainedModel, Checkpoint], policy: CrossingPolicy
) -> None:
    """Both policies agree within 1e-4 with transformers' forward."""
    untouched, checkpoint = pair
    window = window_of(2)
    tokens = [*window.prompt_ids, *window.forced_ids]
    expected = expected_nll(logprobs_by_row(untouched, "yarn", tokens, [4] * len(tokens)), window)
    assert outcome(checkpoint, policy, window).nll == pytest.approx(expected, abs=1e-4)


def test_the_policies_differ_after_a_crossing(
    pair: tuple[PreTrainedModel, Checkpoint],
) -> None:
    """The comparisons of the policies would prove nothing without a difference."""
    window = window_of(2)
    nll = {
        policy: torch.tensor(outcome(pair[1], policy, window).nll)
        for policy in ("fixed", "grow", "grow-exact", "stale")
    }
    assert float((nll["stale"] - nll["grow"]).abs().max()) > 1e-2
    assert float((nll["grow"] - nll["fixed"]).abs().max()) > 1e-2
    assert torch.equal(nll["grow-exact"], nll["fixed"])


def test_stale_keys_are_those_of_any_engine_where_the_table_does_not_change(
    pair: tuple[PreTrainedModel, Checkpoint],
) -> None:
    """Before a crossing, `stale` equals `grow`; after it, the two differ."""
    window = window_of(1, scored_tokens=20)
    before = CrossingWindow(
        Shape(L, 1, 40, 1), window.prompt_ids[:24], (), NEEDLE, num_answer_tokens=2
    )
    tokens = [*window.prompt_ids, *window.forced_ids]
    forced = tuple(tokens[24 : L + 10])
    fed = CrossingWindow(before.shape, before.prompt_ids, forced, NEEDLE, num_answer_tokens=2)
    stale, grow = (_all_nll(pair[1], policy, fed) for policy in ("stale", "grow"))
    num_before = L + 1 - 24  # the token at index L is the last that is predicted before
    assert stale[:num_before] == pytest.approx(grow[:num_before], abs=1e-4)
    assert stale[num_before:] != pytest.approx(grow[num_before:], abs=1e-3)


def _all_nll(checkpoint: Checkpoint, policy: CrossingPolicy, window: CrossingWindow) -> list[float]:
    """The negative log-likelihood of every forced token."""

    class Everything(CrossingWindow):
        """Scores from the first decoded token on."""

        __slots__ = ()

        @property
        def scored(self) -> slice:
            return slice(0, len(self.forced_ids))

    whole = Everything(window.shape, window.prompt_ids, window.forced_ids, window.needle, 2)
    return list(outcome(checkpoint, policy, whole).nll)


@pytest.mark.costly
def test_windows_do_not_depend_on_those_beside_them(
    pair: tuple[PreTrainedModel, Checkpoint],
) -> None:
    """Three windows together answer as each alone, under every policy but fixed."""
    windows = []
    for number in range(3):
        window = window_of(2)
        prompt = (number, *window.prompt_ids[1:])
        windows.append(CrossingWindow(window.shape, prompt, window.forced_ids, NEEDLE, 2))
    for policy in ("stale", "grow", "grow-exact"):
        together = run_windows(pair[1], "yarn", policy, windows)
        alone = [outcome(pair[1], policy, window).nll for window in windows]
        for one, other in zip(together, alone, strict=True):
            assert one.nll == pytest.approx(other, abs=1e-5)


def test_a_window_is_laid_out_as_it_says(embedded: Checkpoint) -> None:
    """Needles are in the prompt, crossings in the forced part; scored tokens are the same."""
    tokenizer = embedded.tokenizer
    text = "".join(f"line {number} of a text\n" for number in range(4000))
    sources = draw_sources(tokenizer, [Document("a", text)], Shape(256, 3), 4, seed=1)
    assert [source.asked for source in sources] == [0, 1, 0, 1]
    scored = []
    for num_crossings in (1, 2, 3):
        shape = Shape(256, num_crossings)
        window = lay_out(tokenizer, sources[0], shape)
        assert len(window.prompt_ids) == 256 - 16
        prompt = tokenizer.decode(list(window.prompt_ids))
        for needle in sources[0].needles:
            assert "\n" + needle.definition in prompt
        whole = [*window.prompt_ids, *window.forced_ids]
        ceiling = 256 * 2 ** (num_crossings - 1)
        scored.append(whole[ceiling + 1 : ceiling + 65])
        assert list(window.forced_ids[window.scored]) == scored[0]
        assert tokenizer.decode(whole[ceiling + 65 :]) == "\n" + window.needle.question
    assert scored[0] == scored[1] == scored[2]


def test_text_that_is_too_short_is_refused_with_the_numbers(embedded: Checkpoint) -> None:
    """The numbers are the windows found, their length, and the windows requested."""
    with pytest.raises(EvalError, match=r"--windows: .* has 0 of 1089 tokens .* 2 asked for"):
        draw_sources(embedded.tokenizer, [Document("a", "x = 1\n")], Shape(256, 3), 2, seed=0)
    source = CrossingSource(tuple(range(200)), (NEEDLE, NEEDLE), 0)
    with pytest.raises(EvalError, match="--native-len: 32 tokens leave no room"):
        lay_out(embedded.tokenizer, source, Shape(32, 1))


def test_the_needle_is_found_where_the_table_is_right(embedded: Checkpoint) -> None:
    """Fixed and grow-exact agree; an unknown method is refused by name."""
    text = "".join(f"value_{number} = {number * 7919 % 1000}\n" for number in range(400))
    shape = Shape(256, 1, scored_tokens=16)
    sources = draw_sources(embedded.tokenizer, [Document("a", text)], shape, 2, seed=3)
    windows = [lay_out(embedded.tokenizer, source, shape) for source in sources]
    fixed = run_windows(embedded, "yarn", "fixed", windows)
    exact = run_windows(embedded, "yarn", "grow-exact", windows)
    assert [each.nll for each in fixed] == [each.nll for each in exact]
    assert [each.found for each in fixed] == [each.found for each in exact]
    assert any(each.found for each in fixed)
    with pytest.raises(EvalError, match="method sideways: rope_type: must be one of"):
        run_windows(embedded, "sideways", "grow", windows)
