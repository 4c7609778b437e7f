"""`ropewalk doctor [MODEL]`: one line for each check, and an exit code."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SECTIONS, ServeSettings, load_settings
from ropewalk.server.wording import printable
from ropewalk.studies.doctor.finding import Finding, checked
from ropewalk.studies.doctor.gpu import gpu_findings
from ropewalk.studies.doctor.machine import (
    check_hub_cache,
    check_huge_pages,
    check_kernel_cache,
    check_memory,
    check_port,
    check_processor,
    check_settings,
)
from ropewalk.studies.doctor.packages import (
    check_device,
    check_packages,
    check_python,
    check_torch,
    read_torch,
)

_RANKS = ("ok", "warn", "fail")


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
    Python, packages, torch, device, processor, the caches of kernels and of the hub, memory, the
    settings' files, port and MODEL, and for a GPU driver, compiler and Triton's cache. No weights
    are loaded without --load. The exit code is 0 if no check fails, else that of `serve`, which is
    2 for all that can be mended. The settings are those of `serve`.
    """
    with sentences():
        settings = load_settings(given(flags))
        from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415

        log_to_stderr()
        found = []
        for each in findings(settings, loads=load):
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


def findings(settings: ServeSettings, *, loads: bool = False) -> Iterator[Finding]:
    """Yield the finding of each check. Never raises for something that is broken.

    With `loads` the model is loaded if nothing speaks against it.
    """
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
    yield checked("memory", check_memory)
    yield checked("huge pages", check_huge_pages)
    yield checked("hub cache", check_hub_cache)
    yield checked("settings", lambda: check_settings(settings))
    yield checked("port", lambda: check_port(settings))
    if isinstance(torch, Finding):
        yield Finding("fail", "model", "not checked, because torch cannot be imported")
        return
    from ropewalk.studies.doctor.model import (  # noqa: PLC0415  # needs the packages above
        check_model,
        load_findings,
    )

    model = checked("model", lambda: check_model(settings, is_loaded_next=loads))
    yield model
    if not loads:
        return
    if model.status == "fail":
        yield Finding("fail", "load", "not tried, because the check of the model failed")
        return
    yield from load_findings(settings)
