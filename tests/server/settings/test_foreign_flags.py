"""Flags that operators of other servers type by habit: understood, or refused with a sentence."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ropewalk.cli import ropewalk
from ropewalk.server.serve_command import serve
from ropewalk.server.settings.foreign_flags import ALIASES, REFUSED
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.studies.inspection.command import inspect
from tests.servers.processes import run_here
from tests.settings_page import foreign_table

ROOT = Path(__file__).resolve().parents[3]
OWN = {flag for param in serve.params if isinstance(param, click.Option) for flag in param.opts}
# Tried by an operator by habit; each was refused, some with the guess of another setting.
BY_HABIT = (
    *("--model", "--model-path", "-m", "-c", "--ctx-size", "--context-length", "-tp"),
    *("--quantization", "--cache-type-k", "--enable-prefix-caching", "--enable-chunked-prefill"),
    *("--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser"),
    *("--disable-log-requests", "--schedule-policy", "--enable-lora", "--hf-overrides"),
    *("--seed", "--generation-config", "--root-path", "--rope-theta", "--swap-space"),
    *("--speculative-config", "--uvicorn-log-level", "--otlp-traces-endpoint"),
    *("--max-tokens", "--max-new-tokens", "--chat-template-kwargs", "--random-seed"),
)


def given(*args: str) -> dict[str, object]:
    """The settings that `serve` reads from its command line."""
    context = serve.make_context("serve", list(args))
    return {name: value for name, value in context.params.items() if value is not None}


def refusal(*args: str) -> str:
    """The error of `serve`, without its first lines about usage."""
    ended = CliRunner().invoke(ropewalk, ["serve", *args])
    assert ended.exit_code == 2, ended.output
    return ended.output.partition("Error: ")[2]


@pytest.mark.parametrize("flag", ALIASES)
def test_a_flag_of_the_same_meaning_sets_our_setting(flag: str) -> None:
    """Its value may stand behind a blank or an equals sign."""
    name = ALIASES[flag]
    if ServeSettings.model_fields[name].annotation is bool:
        assert given(flag, "x/y") == {name: True, "model": "x/y"}
        return
    value = "x/y" if name == "model" else "7"
    assert given(flag, value) == given(f"{flag}={value}") == {name: value}


@pytest.mark.parametrize("flag", BY_HABIT)
def test_a_flag_typed_by_habit_is_understood_or_explained(flag: str) -> None:
    """A guess of another setting would be wrong."""
    assert (flag in ALIASES) != (flag in REFUSED)
    if flag in REFUSED:
        told = refusal(flag, "--port", "1")
        assert told.startswith(f"No such option {flag}: ")
        assert "Did you mean" not in told


def test_all_wrong_flags_are_named_at_once() -> None:
    """Values of theirs are not mistaken for the model, or for a flag."""
    told = refusal("x/y", "--swap-space=4", "-ngl", "99", "--enable-prefix-caching")
    assert [line.split(":")[0] for line in told.splitlines()] == [
        *("No such option --swap-space", "No such option -ngl"),
        "No such option --enable-prefix-caching",
    ]
    told = refusal("--foo", "--bar", "--quantization", "awq", "--temp", "-1", "--lora", "x")
    wrong = [re.split("[:.]", line)[0].split()[-1] for line in told.splitlines()]
    assert wrong == ["--foo", "--bar", "--quantization", "--temp", "--lora"]


def test_another_servers_spelling_of_rope_scaling_is_told_what_to_write() -> None:
    """llama.cpp names a method only."""
    for word in ("yarn", "linear", "none"):
        with pytest.raises(SettingsError) as error:
            load_settings(given("--rope-scaling", word))
        written = '{"rope_type": "yarn", "factor": 4.0}'
        told = f"rope_scaling: must be a JSON object, such as {written}, got '{word}'"
        assert str(error.value).startswith(told)
    load_settings(given("--rope-scaling", written))


def test_the_command_line_of_another_server_is_read() -> None:
    """The real command gets as far as the values of its settings."""
    ended = run_here(
        *("serve", "-m", "x/y", "-c", "0", "-np", "0", "--tp", "0", "--dtype", "half"),
        *("--block-size=1", "--disable-cuda-graph", "--alias", ""),
    )
    assert ended.returncode == 2
    for name in ("max_model_len", "max_num_seqs", "tensor_parallel_size", "page_size"):
        assert f"{name}: must be at least" in ended.stderr
    assert "served_model_name: must have at least 1" in ended.stderr
    assert "dtype" not in ended.stderr


def test_sentences_name_flags_that_exist_and_none_hides_one_of_ours() -> None:
    """A flag of ours that came later would never be reached."""
    assert not OWN & {*ALIASES, *REFUSED}
    assert not set(ALIASES) & set(REFUSED)
    assert set(ALIASES.values()) <= set(ServeSettings.model_fields)
    for sentence in REFUSED.values():
        assert sentence.endswith(".")
        assert set(re.findall(r"--[a-z-]+", sentence)) <= OWN, sentence


def test_a_value_that_looks_like_a_foreign_flag_stays_a_value() -> None:
    """Everything behind two hyphens is one, too."""
    assert given("--api-key", "-c", "--host=-m") == {"api_key": "-c", "host": "-m"}
    assert given("--", "-m") == {"model": "-m"}


def test_a_command_without_the_setting_does_not_know_the_flag() -> None:
    """`inspect` serves nothing, so it has no sequences; the model and its length it has."""
    context = inspect.make_context("inspect", ["-m", "x/y", "-c", "512"])
    assert (context.params["model"], context.params["max_model_len"]) == ("x/y", "512")
    with pytest.raises(click.UsageError, match="No such option --parallel"):
        inspect.make_context("inspect", ["--parallel", "4"])


@pytest.mark.parametrize("names", [("b",), ("b", "c"), ("b", "x/y")])
def test_several_served_names_are_not_taken_for_a_model(names: tuple[str, ...]) -> None:
    """The second name was searched on the hub."""
    told = refusal("--served-model-name", "a", *names, "--port", "1")
    assert told.startswith(f"served_model_name: takes one name, got '{' '.join(['a', *names])}'.")
    aliases = told.partition("--model-aliases '")[2].partition("'")[0]
    flags = ("--served-model-name", "a", "--model-aliases", aliases)
    settings = load_settings(given(*flags))
    assert settings.model_aliases == {each: "a" for each in names if "/" not in each}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("a", "--model", "b"), "as a and as --model b: drop --model b."),
        (("--model=b", "--port", "1", "a"), "as a and as --model b: drop --model b."),
        (("-m", "a", "--model-path", "b"), "as -m a and as --model-path b: drop --model-path b."),
    ],
)
def test_a_model_that_is_given_twice_is_told_which_one_to_drop(
    arguments: tuple[str, ...], told: str
) -> None:
    """The argument is the usual place."""
    assert refusal(*arguments) == f"MODEL is given twice, {told}\n"


def test_a_model_may_stand_behind_its_served_name() -> None:
    """A path or an owner's hub id is no name."""
    expected = {"served_model_name": "a", "model": "x/y"}
    assert given("--served-model-name", "a", "x/y") == expected
    assert given("x/y", "--served-model-name", "a") == expected


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("float", "float32")])
def test_other_words_for_number_types_are_read(
    monkeypatch: pytest.MonkeyPatch, word: str, dtype: str
) -> None:
    """A variable takes them, too."""
    assert load_settings({"dtype": word}).dtype == dtype
    monkeypatch.setenv("ROPEWALK_DTYPE", word)
    assert load_settings({}).dtype == dtype


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--max-modl-len", " Did you mean `--max-model-len`?"),
        ("--max_model_len", " Did you mean `--max-model-len`?"),
        ("--served-name", ""),
        ("--stream-output", ""),
        ("--max-seq-len", ""),
        ("--folder-of-weights", ""),
        ("--wibble", ""),
    ],
)
def test_a_misspelt_flag_is_told_the_nearest_one_if_it_is_near(flag: str, hint: str) -> None:
    """A flag that lacks a word is no misspelling; a foreign flag is never the suggestion."""
    assert refusal(flag) == f"No such option {flag}.{hint}\n"


def test_the_page_of_settings_lists_the_foreign_flags() -> None:
    """The table is generated: `python -m tests.settings_page` prints it."""
    assert foreign_table() in (ROOT / "docs" / "settings.md").read_text()
