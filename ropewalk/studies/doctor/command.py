"""`ropewalk doctor [MODEL]`: one line for each check, and an exit code."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import click

from ropewalk.server.sentences import DIED, Teller, sentences, told
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import (
    SECTIONS,
    TRACEBACK_VARIABLE,
    ServeSettings,
    load_settings,
)
from ropewalk.server.startup.check_command import check_lines
from ropewalk.server.wording import printable
from ropewalk.studies.doctor.finding import Finding, Status, checked
from ropewalk.studies.doctor.gpu import gpu_findings
from ropewalk.studies.doctor.machine import (
    check_hub_cache,
    check_huge_pages,
    check_kernel_cache,
    check_port,
    check_processor,
)
from ropewalk.studies.doctor.packages import (
    check_device,
    check_packages,
    check_python,
    check_torch,
    read_torch,
)

_RANKS = ("ok", "warn", "fail")
_CHECK = "config check"
_WARNING = re.compile(r"^ +warning ", re.MULTILINE)


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.option(
    "--load",
    is_flag=True,
    help="Load MODEL as `serve` does, run the self-check and one completion.",
)
@with_flags(*SECTIONS)
def doctor(*, as_json: bool, load: bool, **flags: Any) -> None:
    """Check whether this machine and its packages can serve MODEL, one line for each check.

    A line is ok, warn or fail, the name of the check, the finding, and what to do. The checks are
    Python, packages, torch, device, processor, the caches of kernels and of the hub, and port, and
    for a GPU driver, compiler and Triton's cache. The lines of `config check` follow. No weights
    are loaded without --load. The exit code is 0 if no check fails, else that of `serve`, which is
    2 for all that can be mended. The settings are those of `serve`.
    """
    with sentences() as teller:
        settings = load_settings(given(flags))
        found = []
        for each in findings(settings, teller, loads=load):
            found.append(each)
            if not as_json:
                click.echo(printable(each.line()))
        worst = max((each.status for each in found), key=_RANKS.index)
        if as_json:
            checks = [
                {
                    "status": each.status,
                    "name": each.name,
                    "finding": each.text,
                    "action": each.action or None,
                }
                for each in found
            ]
            click.echo(json.dumps({"status": worst, "checks": checks}, indent=2))
        failed = next((each for each in found if each.status == "fail"), None)
        if failed is not None:
            sys.exit(failed.exit_code)


def findings(settings: ServeSettings, teller: Teller, *, loads: bool = False) -> Iterator[Finding]:
    """Yield the finding of each check. Never raises for something that is broken."""
    yield checked("python", check_python)
    yield checked("packages", check_packages)
    torch = read_torch()
    if isinstance(torch, Finding):
        yield torch
    else:
        yield checked("torch", lambda: check_torch(torch))
        yield checked("device", lambda: check_device(torch, settings.device))
    yield from gpu_findings(settings.device, None if isinstance(torch, Finding) else torch)
    yield checked("processor", check_processor)
    yield checked("kernel cache", check_kernel_cache)
    yield checked("huge pages", check_huge_pages)
    yield checked("hub cache", check_hub_cache)
    yield checked("port", lambda: check_port(settings))
    if isinstance(torch, Finding):
        yield Finding("fail", _CHECK, "not made, because torch cannot be imported")
    else:
        yield _check(settings, teller, loads=loads)


def _check(settings: ServeSettings, teller: Teller, *, loads: bool) -> Finding:
    """Return what `config check` says, or how it and `serve` end."""
    try:
        lines = check_lines(settings, teller, loads=loads)
    except Exception as error:  # noqa: BLE001  # as `serve` reports it
        refusal, code = told(error)
        action = f"set {TRACEBACK_VARIABLE}=1 and run `serve`" if code == DIED else ""
        return Finding("fail", _CHECK, " ".join(refusal), action, code)
    text = "\n".join(lines)
    status: Status = "warn" if _WARNING.search(text) else "ok"
    return Finding(status, _CHECK, text)
