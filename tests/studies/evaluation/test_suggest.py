"""The suggested deployment, from made-up measurements."""

import random
from collections.abc import Sequence

from ropewalk.server.corpus.needles import FORMS
from ropewalk.studies.evaluation.cells import PERPLEXITY, RETRIEVAL, QueryScore, WindowScore
from ropewalk.studies.evaluation.plan import LengthPlan, Variant
from ropewalk.studies.evaluation.report import LengthReport, LengthRow
from ropewalk.studies.evaluation.suggest import suggestion

UNTOUCHED, BY_POSITION = Variant("none", None), Variant("yarn", "by_position")
GROW, FIXED = Variant("yarn", "grow"), Variant("yarn", "fixed")
LOGN = Variant("yarn+logn", "by_position")
NUM_WINDOWS, NUM_QUERIES = 16, 40
_TEXT = random.Random(0)
TEXTS = [_TEXT.uniform(1.0, 3.0) for _ in range(NUM_WINDOWS)]  # nats a token: texts differ most


def row(variant: Variant, nats: Sequence[float], num_right: int) -> LengthRow:
    """At 1,024 tokens; 10 target tokens a window."""
    windows = tuple(WindowScore("text", 10 * each, 10, 40) for each in nats)
    queries = tuple(
        QueryScore(FORMS[0].name, 0.5, 100, number < num_right, "") for number in range(NUM_QUERIES)
    )
    return LengthRow(variant, 1024, 4.0, {PERPLEXITY: windows, RETRIEVAL: queries})


def chosen(*rows: LengthRow) -> str:
    """The label of the suggested variant."""
    plan = LengthPlan(
        native_len=256,
        carries_scaling=False,
        context_lens=(256, 1024),
        variants=tuple(each.variant for each in rows),
        num_windows=NUM_WINDOWS,
        target_tokens=10,
        num_queries=NUM_QUERIES,
        forms=FORMS,
        depths=(0.5,),
        seed=0,
        suggested_lens=(1024,),
    )
    report = LengthReport("model", "digest", "float32", "cpu", "text", 1000, "now", plan, rows)
    first = suggestion(report, "demo", None).splitlines()[0]
    return first.removeprefix("# For contexts of 1024 tokens: ").split(" (")[0]


def shifted(by: float, noise: float = 0.002) -> list[float]:
    """The same windows under another variant, their mean moved by just `by`."""
    draw = random.Random(by)  # of its own: a test must not depend on which ran before it
    drawn = [draw.uniform(-noise, noise) for _ in TEXTS]
    mean = sum(drawn) / len(drawn)
    return [each + by + one - mean for each, one in zip(TEXTS, drawn, strict=True)]


def test_a_lower_perplexity_on_every_window_wins() -> None:
    """The difference may be small beside the spread between texts."""
    assert chosen(row(BY_POSITION, shifted(0.05), 40), row(FIXED, TEXTS, 40)) == "yarn fixed"
    assert (
        chosen(row(BY_POSITION, TEXTS, 40), row(LOGN, shifted(-0.05), 40))
        == "yarn+logn by_position"
    )


def test_the_simpler_of_two_equal_methods_wins() -> None:
    """By_position comes first, then grow, then fixed; no log-n beats log-n, in any order."""
    same = [
        row(LOGN, shifted(-0.0002), 40),
        row(FIXED, TEXTS, 40),
        row(GROW, shifted(-0.0001), 40),
        row(BY_POSITION, shifted(0.0), 40),
    ]
    assert chosen(*same) == chosen(*reversed(same)) == "yarn by_position"
    assert chosen(*same[1:3]) == chosen(*reversed(same[1:3])) == "yarn grow"


def test_retrieval_comes_first() -> None:
    """Shares within the interval of each other count as equal."""
    assert chosen(row(BY_POSITION, shifted(-0.5), 20), row(FIXED, TEXTS, 39)) == "yarn fixed"
    assert chosen(row(BY_POSITION, shifted(-0.5), 38), row(FIXED, TEXTS, 39)) == "yarn by_position"


def test_the_untouched_table_is_no_choice_beyond_its_length() -> None:
    """A deployment without scaling ends at the trained length."""
    assert (
        chosen(row(UNTOUCHED, shifted(-1.0), 40), row(BY_POSITION, TEXTS, 40)) == "yarn by_position"
    )


def test_without_windows_retrieval_decides() -> None:
    """If retrieval is equal too, then the simpler variant wins."""
    assert chosen(row(BY_POSITION, [], 38), row(FIXED, [], 40)) == "yarn fixed"
    assert chosen(row(BY_POSITION, [], 40), row(FIXED, [], 40)) == "yarn by_position"
