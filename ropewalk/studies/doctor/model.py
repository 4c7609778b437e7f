"""Checks of the model: as planned from its files, and with `--load` as loaded.

The first loads no weights. The others are the load of `serve`, its self-check and one completion.
No port is opened. The engine and the other processes of tensor parallelism are ended.
"""

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.sentences import DIED, told
from ropewalk.server.settings.load import TRACEBACK_VARIABLE, ServeSettings, SettingsError
from ropewalk.server.startup.planning.dry_run import outlook_of
from ropewalk.server.startup.planning.planned_deployments import model_name
from ropewalk.server.startup.progress import LoadingProgress
from ropewalk.studies.doctor.finding import Finding

if TYPE_CHECKING:
    from ropewalk.server.startup.load_service import LoadedModel

_NOT_LOADED = "; not loaded: --load loads it, runs the self-check and one completion"
_SELF_CHECK = "checking the model"  # the phase that ends a load (model_runtime/loading)
_PROMPT, _NUM_TOKENS = "Hello", 8


def check_model(settings: ServeSettings, *, is_loaded_next: bool) -> Finding:
    """Plan the model's serving as `config check` does, without weights."""
    try:
        outlook = outlook_of(settings)
    except (ModelError, SettingsError) as error:
        return Finding("fail", "model", str(error))
    outline, plan = outlook.outline, outlook.plan
    weights = "weights not downloaded yet"
    if outlook.num_weight_bytes is not None:
        weights = f"{size_text(outlook.num_weight_bytes)} of weights"
    longest = max(each.max_len for each in plan.deployments)
    dtype = str(outline.dtype).removeprefix("torch.")
    problems = [outlook.template_problem, *outlook.left_out]
    warning = "".join(f"; {each}" for each in problems if each is not None)
    return Finding(
        "warn" if warning else "ok",
        "model",
        f"{model_name(settings)}: {outline.architecture}, {outline.device}, {dtype}, {weights}, "
        f"{outline.native().native_len} tokens trained, {longest} served{warning}"
        + ("" if is_loaded_next else _NOT_LOADED),
        outlook.advice or "",
    )


def load_findings(settings: ServeSettings) -> Iterator[Finding]:
    """Load the model, and yield a finding for each part, the last one of which may fail.

    Never raises: a failure has the sentence and the exit code of `serve`.
    """
    if settings.replicas is not None:
        text = "not checked, because replicas load the model in processes of a Ray cluster"
        yield Finding("warn", "load", text, "run it without replicas")
        return
    began = {"load": time.monotonic()}
    progress = LoadingProgress(lambda line: click.echo(line, err=True))

    def enter(phase: str) -> None:
        progress.enter(phase)
        if phase == _SELF_CHECK:
            began["self-check"] = time.monotonic()

    loaded = None
    try:
        from ropewalk.server.startup.load_service import load_served  # noqa: PLC0415  # seconds

        progress.watch_compiler()
        loaded = load_served(settings, enter, progress.downloaded)
        progress.finish()
        began["completion"] = time.monotonic()
        yield _loaded(loaded, began["self-check"] - began["load"])
        yield _checked(loaded, began["completion"] - began["self-check"])
        yield _completed(loaded, began["completion"])
    except Exception as error:  # noqa: BLE001  # as `serve` reports it
        lines, code = told(error)
        action = f"set {TRACEBACK_VARIABLE}=1 and run `serve`" if code == DIED else ""
        failed = list(began)[-1]
        if failed == "self-check":
            yield _part("load", "weights and tokenizer", began[failed] - began["load"])
        yield Finding("fail", failed, "\n".join(lines), action, code)
    finally:
        if loaded is not None and loaded.ranks is not None:
            loaded.ranks.close()


def _part(name: str, text: str, seconds: float) -> Finding:
    return Finding("ok", name, f"{text}, {seconds:.1f} s")


def _loaded(loaded: "LoadedModel", seconds: float) -> Finding:
    checkpoint, ranks = loaded.checkpoint, loaded.ranks
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    processes = "" if ranks is None else f" in {ranks.size} processes"
    where = f"on {checkpoint.device} in {dtype}{processes}"
    return _part("load", f"{type(checkpoint.model).__name__} {where}", seconds)


def _checked(loaded: "LoadedModel", seconds: float) -> Finding:
    report = loaded.checkpoint.report
    bits = "the same bits in any batch" if report.bitwise else "other bits in a batch"
    found = f"logits within {report.difference:.2g} of {report.threshold:.2g}, {bits}"
    return _part("self-check", found, seconds)


def _completed(loaded: "LoadedModel", began: float) -> Finding:
    """Allocate the cache and answer one greedy request. Raises what `serve` meets there."""
    from ropewalk.model_runtime.deployments.deployment import RopeRequest  # noqa: PLC0415
    from ropewalk.model_runtime.request import (  # noqa: PLC0415
        FinishReason,
        Request,
        SamplingParams,
    )
    from ropewalk.server.metrics import MetricFactory  # noqa: PLC0415
    from ropewalk.server.startup.load_service import metrics_of  # noqa: PLC0415

    plan = loaded.served.plan
    engine = loaded.engine(metrics_of(MetricFactory(), plan))
    engine.start()
    try:
        deployment = plan.deployments[0]
        ids = loaded.checkpoint.tokenizer.encode(_PROMPT)[: deployment.max_len]
        num_tokens = min(_NUM_TOKENS, deployment.max_len - len(ids) + 1)
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        tier_choice = deployment.choose(RopeRequest(), len(ids), num_tokens)
        (outputs,) = engine.generate([Request("doctor", tuple(ids), sampling, tier_choice)])
    finally:
        engine.stop()
    if outputs[-1].finish_reason is FinishReason.ERROR:
        text = outputs[-1].error or "the engine failed"
        return Finding("fail", "completion", text, "see the log", DIED)
    text = json.dumps("".join(each.text for each in outputs), ensure_ascii=False)
    return _part("completion", f"{_PROMPT} {text}", time.monotonic() - began)
