"""Flags built from the settings, shown under the settings' headings."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from ropewalk.server.settings.fields import Section, flags_of, unit_of
from ropewalk.server.settings.problems import variable_of
from ropewalk.server.wording import HelpCommand

_MODEL_FLAG = "model_flag"  # the argument has the name of the setting
# Settings that most operators set, in the order of help and docs/reference/settings.md.
FIRST = (
    *("max_model_len", "rope_scaling", "rope_policy", "dtype", "kv_cache_gib", "max_num_seqs"),
    *("host", "port", "api_key_file", "config"),
)
_FIRST_HEADING = "Ten to know first"


class SettingOption(click.Option):
    """A flag of one setting."""

    def __init__(self, *args: Any, heading: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heading = heading


class SettingsCommand(HelpCommand):
    """A command whose help has its flags under headings; a flag may name MODEL, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and read MODEL from its flag where the flag stands for it."""
        rest = super().parse_args(ctx, args)
        flag = ctx.params.pop(_MODEL_FLAG, None)
        if flag is None:
            return rest
        if ctx.params["model"] is not None:
            told = f"MODEL is given twice, as {ctx.params['model']} and as --model {flag}."
            raise click.UsageError(told)
        ctx.params["model"] = flag
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the settings to know first, the other sections in order, then other options."""
        params = self.get_params(ctx)
        first = FIRST if {*FIRST} <= {param.name for param in params} else ()
        rank = {name: place for place, name in enumerate(first)}
        records: dict[str, list[tuple[str, str]]] = {}
        for param in sorted(params, key=lambda each: rank.get(str(each.name), len(rank))):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                heading = param.heading if isinstance(param, SettingOption) else "Options"
                heading = _FIRST_HEADING if param.name in rank else heading
                records.setdefault(heading, []).append(record)
        for heading, of_section in records.items():
            with formatter.section(heading):
                formatter.write_dl(of_section)


def with_flags(
    *sections: type[Section], without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds one flag per setting, in the order of the sections.

    `without` names settings that the command does not use.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for section in reversed(sections):
            for name, field in reversed(section.model_fields.items()):
                if name not in without:
                    command = _option(name, field, str(section.__doc__))(command)
        return command

    return decorate


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were on the command line."""
    return {name: value for name, value in flags.items() if value is not None}


def default_text(field: Any) -> str:
    """Return a default as help and docs show it; empty if the text must explain it."""
    if field.default is None:
        return ""
    if isinstance(field.default, tuple):
        return ", ".join(field.default)
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"


def _option(name: str, field: Any, heading: str) -> Callable[..., Any]:
    notes = [variable_of(name)]
    if default_text(field):
        notes.append(f"default: {default_text(field)}")
    options: dict[str, Any] = {
        "cls": SettingOption,
        "heading": heading,
        "help": f"{field.description}  [{'; '.join(notes)}]",
    }
    if field.annotation is bool:
        options.update(is_flag=True, default=None)
    else:
        options.update(metavar=unit_of(field).upper().replace(" ", "_"))
    if name == "model":
        options.update(hidden=True)  # the usage shows the argument
    parameter = _MODEL_FLAG if name == "model" else name
    return click.option(*flags_of(name, field), parameter, **options)
