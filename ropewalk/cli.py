"""The command line: serve, route, chat, top, inspect, config check, cache, bench, eval, doctor.

A command's module is imported when the command runs. The settings of `serve` take a third of a
second to import and transformers takes seconds, and `--help` and `--version` need neither.
"""

import importlib
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


class Entry(NamedTuple):
    """One command: its module, its name there, and the first sentence of its help."""

    module: str
    attribute: str
    short_help: str


class LazyGroup(click.Group):
    """A group that imports a command when it runs, and lists it without importing it."""

    def __init__(self, *args: Any, entries: dict[str, Entry], **options: Any) -> None:
        super().__init__(*args, **options)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported now."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        found: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; an error names the nearest one."""
        known = self.list_commands(ctx)
        if args[0] not in known and args[0][:1].isalnum() and not ctx.resilient_parsing:
            from ropewalk.server.wording import did_you_mean  # noqa: PLC0415

            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._help(ctx, name)) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands, and the group's own options, that begin with `incomplete`."""
        commands = [
            CompletionItem(name, help=self._help(ctx, name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _help(self, ctx: click.Context, name: str) -> str:
        if name in self.entries:
            return self.entries[name].short_help
        command = super().get_command(ctx, name)
        assert command is not None
        return command.get_short_help_str(limit=100)


_COMMANDS = {
    "bench": Entry(
        "ropewalk.studies.bench.command",
        "bench",
        "Measure latency against context length on the server at URL.",
    ),
    "chat": Entry(
        "ropewalk.server.terminal.chat_command",
        "chat",
        "Talk to the server at URL from a terminal, or send it standard input.",
    ),
    "doctor": Entry(
        "ropewalk.studies.doctor.command",
        "doctor",
        "Check whether this machine and its packages can serve MODEL, one line for each check.",
    ),
    "eval": Entry(
        "ropewalk.studies.evaluation.command",
        "evaluate",
        "Measure what MODEL knows at each context length, by method and policy.",
    ),
    "route": Entry(
        "ropewalk.server.router.command",
        "route",
        "Pass requests on to the servers at ADDRESSES, and continue answers that lose one.",
    ),
    "inspect": Entry(
        "ropewalk.studies.inspection.command",
        "inspect",
        "Show MODEL's tables tier by tier, what a context costs, and attention by distance.",
    ),
    "serve": Entry(
        "ropewalk.server.serve_command",
        "serve",
        "Serve MODEL: a folder, a GGUF file or a hub id. Default: the embedded model.",
    ),
    "top": Entry(
        "ropewalk.server.terminal.top_command",
        "top",
        "Show the queue, cache and latency by context length of the server at URL.",
    ),
}
_CONFIG_COMMANDS = {
    "check": Entry(
        "ropewalk.server.startup.check_command",
        "check",
        "Show what `ropewalk serve` would serve here.",
    ),
}

_CACHE_COMMANDS = {
    "clear": Entry(
        "ropewalk.server.cache_command",
        "clear",
        "Delete every page in the folder PATH of --kv-disk.",
    ),
    "stats": Entry(
        "ropewalk.server.cache_command",
        "stats",
        "Show the number of pages in the folder PATH of --kv-disk, by model and settings.",
    ),
}


def _tell_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value and not ctx.resilient_parsing:
        from ropewalk.server.version import version_and_commit  # noqa: PLC0415  # asks git

        click.echo(f"ropewalk, version {version_and_commit()}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    entries=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_tell_version,
    help="Show the version and its commit, and exit.",
)
def ropewalk() -> None:
    """Serve language models past their trained length, each request on the rotation that fits."""


@ropewalk.group(cls=LazyGroup, entries=_CONFIG_COMMANDS)
def config() -> None:
    """Look at a configuration file."""


@ropewalk.group(cls=LazyGroup, entries=_CACHE_COMMANDS)
def cache() -> None:
    """Look at the folder of --kv-disk, or empty it."""
