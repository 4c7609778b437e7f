"""The cache format that is suggested if a context does not fit the memory."""

import json
import re

import pytest

from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of
from ropewalk.server.startup.planning.format_advice import format_advice
from ropewalk.studies.doctor.model import check_model

# The embedded model keeps 2,048 tokens of 4,096 bytes in float32: 8 MiB. Sealed pages also need an
# open page of 256 KiB for each sequence, and as much for a step of 64 tokens.
LONGEST = 2048
SMALL_STEP = {"max_num_seqs": "1", "max_num_batched_tokens": "64"}


def advice(**settings: str) -> str | None:
    """What the dry run suggests."""
    return outlook_of(load_settings({**SMALL_STEP, **settings})).advice


@pytest.mark.parametrize(
    ("mib", "named"),
    [(8, None), (4.1, "bfloat16"), (2.7, "int8"), (2.2, "k8v4"), (1.7, "int4")],
)
def test_the_format_with_the_smallest_loss_that_fits_is_named(
    mib: float, named: str | None
) -> None:
    """Each size holds the context in one format, and not in those with a smaller loss."""
    size = {"kv_cache_gib": str(mib / 1024)}
    found = advice(**size)
    if named is None:
        assert found is None
        return
    assert found == f"a context of {LONGEST} tokens fits with kv_cache_dtype: {named}"
    assert advice(**size, kv_cache_dtype=named) is None


def test_fewer_sequences_are_suggested_if_open_pages_take_the_room() -> None:
    """Both settings are named, and together they hold the context."""
    size = {"kv_cache_gib": str(2.7 / 1024), "max_num_seqs": "32"}
    found = advice(**size)
    assert found is not None
    written = dict(re.findall(r"(\w+): (\w+)", found))
    assert set(written) == {"kv_cache_dtype", "max_num_seqs"}
    assert advice(**{**size, **written}) is None


def test_a_context_that_no_format_holds_is_told_with_the_most_that_one_does() -> None:
    """The number is that of the plan with these settings."""
    size = {"kv_cache_gib": str(1.2 / 1024)}
    found = advice(**size)
    assert found is not None
    match = re.fullmatch(
        rf"no format holds a context of {LONGEST} tokens: kv_cache_dtype: int4 holds (\d+); "
        r"lower max_model_len or raise kv_cache_gib",
        found,
    )
    assert match is not None
    plan = outlook_of(load_settings({**SMALL_STEP, **size, "kv_cache_dtype": "int4"})).plan
    assert int(match[1]) == max(each.max_len for each in plan.deployments)


def test_only_formats_that_are_served_are_suggested() -> None:
    """Sealed pages need pages of 32 tokens."""
    found = advice(kv_cache_gib=str(2.7 / 1024), page_size="16")
    assert found is not None
    assert "kv_cache_dtype: bfloat16 holds" in found


def test_a_refusal_ends_with_the_advice() -> None:
    """A stated length that the cache does not hold; `config check` and `doctor` say the same."""
    settings = load_settings(
        {**SMALL_STEP, "kv_cache_gib": str(2.7 / 1024), "max_model_len": "2000"}
    )
    message = (
        r"max_model_len must be <= .*; a context of 2000 tokens fits with kv_cache_dtype: int8$"
    )
    with pytest.raises(SettingsError, match=message):
        outlook_of(settings)
    finding = check_model(settings, is_loaded_next=False)
    assert finding.status == "fail"
    assert re.search(message, finding.text)


def test_config_check_and_doctor_tell_it_in_one_line() -> None:
    """The line stands below the plan; doctor has it as what to do."""
    settings = load_settings({**SMALL_STEP, "kv_cache_gib": str(4.1 / 1024)})
    outlook = outlook_of(settings)
    told = f"a context of {LONGEST} tokens fits with kv_cache_dtype: bfloat16"
    assert f"    does not fit   {told}" in outlook_lines(settings, outlook)
    assert check_model(settings, is_loaded_next=False).action == told


def test_fewer_sequences_alone_are_suggested_if_that_suffices() -> None:
    """The format with the most loss stays."""
    size = {"kv_cache_gib": str(1.7 / 1024), "max_num_seqs": "4", "kv_cache_dtype": "int4"}
    assert advice(**size) == f"a context of {LONGEST} tokens fits with max_num_seqs: 1"
    assert advice(**{**size, "max_num_seqs": "1"}) is None


def test_no_format_is_suggested_for_a_cache_that_is_sized_in_tokens() -> None:
    """It holds as many of any format, so a format would be lossy for nothing."""
    assert advice(kv_cache_tokens="256") is None


def test_a_format_that_holds_no_more_is_not_suggested() -> None:
    """Nor is bfloat16 where it rounds nothing. All settings have one plan here."""
    settings = load_settings({**SMALL_STEP, "kv_cache_gib": str(1.2 / 1024)})
    plan = outlook_of(settings).plan
    held = max(each.max_len for each in plan.deployments)
    assert format_advice(settings, LONGEST, held, lambda _: plan) is None
    assert format_advice(settings, held, held - 64, lambda _: plan) == (
        f"a context of {held} tokens fits with kv_cache_dtype: int8"
    )


def test_the_advice_after_several_lines_is_a_line_of_its_own() -> None:
    """It is not about the last of them alone."""
    entry = {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "max_model_len": 2000}
    deployments = [{"name": name, **entry} for name in ("a", "b")]
    given = {**SMALL_STEP, "kv_cache_gib": str(2.7 / 1024), "deployments": json.dumps(deployments)}
    with pytest.raises(SettingsError) as found:
        outlook_of(load_settings(given))
    *problems, last = str(found.value).split("\n")
    assert len(problems) == 2
    assert last == "a context of 2000 tokens fits with kv_cache_dtype: int8"
