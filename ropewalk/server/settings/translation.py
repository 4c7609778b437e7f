"""Translation of a command line that was written for another server."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence

import click

from ropewalk.model_runtime.loading.hub.local_model import is_there
from ropewalk.server.settings.foreign_flags import ALIASES, REFUSED
from ropewalk.server.wording import did_you_mean

_NAME_FLAG = "--served-model-name"
_MODEL = "--model"  # stands for the argument MODEL
_FLAG = re.compile("-.")
_NUMBER = re.compile(r"-[0-9.]+")  # a value, not a flag


def translated(
    args: Sequence[str],
    params: Sequence[click.Parameter],
    elsewhere: Callable[[str], str | None] = lambda _: None,
) -> list[str]:
    """Return the arguments with the flags of `params` instead of foreign ones of the same meaning.

    `elsewhere` returns the sentence about a flag of another command; None: no command has it.

    Raises click.UsageError with a sentence for each flag that is none of ours, and if several names
    follow --served-model-name.
    """
    takes_value = {
        flag: not param.is_flag
        for param in params
        if isinstance(param, click.Option)
        for flag in (*param.opts, *param.secondary_opts)
    }
    takes_model = any(param.name == "model" for param in params)
    ours: list[str] = []
    problems: list[str] = []
    models: list[str] = []  # as they were given, those with a flag last
    left = iter(args)
    is_value = False  # perhaps that of a flag that is not ours
    for arg in left:
        was_value, is_value = is_value, False
        flag, equals, value = arg.partition("=")
        own = _own_flag(flag, takes_value)
        if arg == "--":
            ours += [arg, *left]
        elif own == _MODEL and takes_model:
            model = [value] if equals else _next(left)
            if not model or model[0].startswith("-"):
                problems.append(f"{flag} needs the path or the hub id of a model.")
            models += [f"{flag} {each}" for each in model]
            ours += model
        elif own is not None and own != _MODEL:
            ours.append(f"{own}{equals}{value}")
            ours += _next(left) if takes_value[own] and not equals else []
        elif _FLAG.match(arg) and not (was_value and _NUMBER.fullmatch(arg)):
            problems.append(elsewhere(flag) or _refusal(flag, takes_value))
            is_value = not equals
        else:
            if not was_value:
                models.insert(0, arg)
            ours.append(arg)
    problems += list(_several_names(ours)) or _several_models(models)
    if problems:
        raise click.UsageError("\n".join(dict.fromkeys(problems)))
    return ours


def _refusal(flag: str, own: Collection[str]) -> str:
    """Return the sentence about a flag that is none of ours."""
    if flag in REFUSED:
        return f"No such option {flag}: {_uncapitalised(REFUSED[flag])}"
    return f"No such option {flag}.{did_you_mean(flag, own)}"


def _own_flag(flag: str, own: Collection[str]) -> str | None:
    """Return the flag of ours that `flag` is or means, or None if it is neither."""
    if flag in own:
        return flag
    named = f"--{ALIASES.get(flag, '').replace('_', '-')}"
    return named if named in own or named == _MODEL else None


def _next(left: Iterator[str]) -> list[str]:
    return [each for each in (next(left, None),) if each is not None]


def _uncapitalised(sentence: str) -> str:
    """Return a sentence as the part of another; names in capitals or code stay."""
    return sentence if sentence[1].isupper() else sentence[0].lower() + sentence[1:]


def _several_models(models: Sequence[str]) -> list[str]:
    """Return the sentence about a flag that names a model beside MODEL or another flag."""
    if len(models) < 2 or not models[-1].startswith("-"):
        return []
    return [f"MODEL is given twice, as {models[0]} and as {models[-1]}: drop {models[-1]}."]


def _several_names(args: Sequence[str]) -> Iterator[str]:
    """Yield the sentence about names behind the first one, as vLLM takes them.

    One argument behind the name that is a path or a hub id of an owner is MODEL.
    """
    if _NAME_FLAG not in args:
        return
    first, *more = args[args.index(_NAME_FLAG) + 1 :] or [""]
    behind = []
    for each in more:
        if each.startswith("-"):
            break
        behind.append(each)
    is_model = len(behind) == 1 and ("/" in behind[0] or is_there(behind[0]))
    if behind and not is_model:
        others = json.dumps({each: first for each in behind if "/" not in each})
        yield (
            f"served_model_name: takes one name, got '{' '.join([first, *behind])}'. MODEL stands "
            f"before the flags, and other names are --model-aliases '{others}'."
        )
