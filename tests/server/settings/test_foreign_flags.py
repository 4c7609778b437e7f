"""Flags of other servers that mean a setting of ours."""

import click
import pytest
from click.testing import CliRunner

from ropewalk.cli import ropewalk
from ropewalk.server.serve_command import serve
from ropewalk.server.settings.fields import flags_of
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.studies.inspection.command import inspect

OTHERS = [
    (flag, name)
    for name, field in ServeSettings.model_fields.items()
    for flag in flags_of(name, field)
    if flag != f"--{name.replace('_', '-')}" or name == "model"
]


def given(*args: str) -> dict[str, object]:
    """The settings that `serve` reads from its command line."""
    context = serve.make_context("serve", list(args))
    return {name: value for name, value in context.params.items() if value is not None}


def refusal(*args: str) -> str:
    """The error of `serve`, without its first lines about usage."""
    ended = CliRunner().invoke(ropewalk, ["serve", *args])
    assert ended.exit_code == 2, ended.output
    return ended.output.partition("Error: ")[2]


@pytest.mark.parametrize(("flag", "name"), OTHERS)
def test_a_flag_of_the_same_meaning_sets_our_setting(flag: str, name: str) -> None:
    """Its value may stand behind a blank or, if the flag is a word, an equals sign."""
    if ServeSettings.model_fields[name].annotation is bool:
        assert given(flag, "x/y") == {name: True, "model": "x/y"}
        return
    value = "x/y" if name == "model" else "7"
    assert given(flag, value) == {name: value}
    if len(flag) > 2:
        assert given(f"{flag}={value}") == {name: value}


def test_another_servers_spelling_of_rope_scaling_is_told_what_to_write() -> None:
    """llama.cpp names a method only."""
    with pytest.raises(SettingsError) as error:
        load_settings(given("--rope-scaling", "linear"))
    written = '{"rope_type": "yarn", "factor": 4.0}'
    told = f"rope_scaling: must be a JSON object, such as {written}, got 'linear'"
    assert str(error.value).startswith(told)
    load_settings(given("--rope-scaling", written))


def test_a_value_that_looks_like_a_foreign_flag_stays_a_value() -> None:
    """Everything behind two hyphens is one, too."""
    assert given("--api-key", "-c", "--host=-m") == {"api_key": "-c", "host": "-m"}
    assert given("--", "-m") == {"model": "-m"}


def test_a_command_without_the_setting_does_not_know_the_flag() -> None:
    """`inspect` serves nothing, so it has no sequences; the model and its length it has."""
    context = inspect.make_context("inspect", ["-m", "x/y", "-c", "512"])
    assert (context.params["model"], context.params["max_model_len"]) == ("x/y", "512")
    with pytest.raises(click.UsageError, match="No such option '--parallel'"):
        inspect.make_context("inspect", ["--parallel", "4"])


def test_a_model_that_is_given_twice_is_refused() -> None:
    """The argument is the usual place. It may stand behind a flag with a value."""
    for arguments in (("a", "--model", "b"), ("--model=b", "--port", "1", "a")):
        assert refusal(*arguments) == "MODEL is given twice, as a and as --model b.\n"


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("float", "float32")])
def test_other_words_for_number_types_are_read(
    monkeypatch: pytest.MonkeyPatch, word: str, dtype: str
) -> None:
    """A variable takes them, too."""
    assert load_settings({"dtype": word}).dtype == dtype
    monkeypatch.setenv("ROPEWALK_DTYPE", word)
    assert load_settings({}).dtype == dtype
