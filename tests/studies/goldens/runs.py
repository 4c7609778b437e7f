"""Runs of eval, inspect and bench whose output is kept: `python -m tests.studies.goldens.runs`.

The command writes every file again, and git shows what changed. Nothing is measured: eval resumes
from a record beside its files, and bench gets times that were made up. `--anew` measures the
records of eval again, and then all its numbers change.
"""

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from ropewalk.cli import ropewalk
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.studies.bench import run as bench_run
from ropewalk.studies.bench.command import bench
from ropewalk.studies.bench.load import Failure, RequestRecord, Timing
from ropewalk.studies.bench.plan import Group, LoadPlan
from ropewalk.studies.bench.target import IdPrompts, Target
from ropewalk.studies.evaluation import subject
from ropewalk.studies.evaluation.command import evaluate
from ropewalk.studies.inspection import heads
from ropewalk.studies.inspection.command import inspect
from tests.studies.goldens.figures import in_words

GOLDENS = Path(__file__).parent
RECORD = "results.jsonl"
_EVAL = ("eval", "--text", "text.txt", "--output", "out", "--dtype", "float32", "--device", "cpu")
_INSPECT = ("inspect", "--dtype", "float32", "--device", "cpu")
_TIERS = ("--rope-tiers", "1,2,8")
_BENCH = ("bench", "http://there:8000/v1", "--context-lens", "64,256,1024", "--concurrency", "2")

RUNS: dict[str, tuple[str, ...]] = {
    "eval-lengths": (
        *_EVAL, "--methods", "none,yarn", "--context-lens", "128,256", "--windows", "3",
        "--queries", "6", "--target-tokens", "16", "--depths", "0,50,100", "--suggest", "512",
    ),
    "eval-many": (
        *_EVAL, "--context-lens", "128,512", "--windows", "1", "--queries", "4",
        "--methods", "none,linear,ntk,yarn,yarn+logn,self_extend", "--forms", "sentence",
        "--depths", "10,60",
    ),
    "eval-prefixes": (
        *_EVAL, "--prefixes", "--methods", "none,yarn", "--rope-policies", "by_position,grow",
        "--context-lens", "64,128,256", "--native-len", "128", "--windows", "2", "--queries", "0",
    ),
    "inspect-text": (*_INSPECT, "--memory-gib", "1", "--config", "two.yaml", "--plot", "plot.png"),
    "inspect-json": (*_INSPECT, "--memory-gib", "0.001", "--config", "two.yaml", "--json"),
    "inspect-heads": (
        *_INSPECT, *_TIERS, "--heads", "0,2", "--sample-text", "text.txt",
        "--sample-tokens", "600", "--plot", "plot.png",
    ),
    "inspect-heads-json": (
        *_INSPECT, *_TIERS, "--heads", "1", "--sample-text", "text.txt",
        "--sample-tokens", "300", "--json",
    ),
    "bench": (
        *_BENCH, "--requests", "5", "--json", "numbers.json", "--plot", "plot.png",
        "--rope", '{"rope_type": "linear", "factor": 2}',
    ),
    "bench-one-token": (
        *_BENCH, "--output-tokens", "1", "--requests", "2", "--json", "-", "--plot", "plot.png",
    ),
    "eval-help": ("eval", "--help"),
    "inspect-help": ("inspect", "--help"),
    "bench-help": ("bench", "--help"),
}  # fmt: skip
REFUSED = tuple(
    tuple(line.split())
    for line in """
    eval --depths x
    eval --depths 0,101
    eval --forms foo
    eval --methods foo
    eval --context-lens 1,x
    eval --context-lens 12
    eval --windows 0 --queries 0
    eval --target-tokens 300 --context-lens 256
    eval --methods string --context-lens 4096
    eval --text nowhere.txt
    eval --suggest x
    inspect --memory-gib -1
    inspect --heads 9
    inspect --heads x
    inspect --sample-tokens 5
    inspect --heads all --sample-text nowhere.txt
    inspect --plot plot.pdf
    inspect --plot nowhere/plot.png
    bench http://there --plot plot.pdf
    bench http://there --plot nowhere/plot.png
    bench http://there --json nowhere/numbers.json
    bench http://there --rope [1]
    bench http://there --timeout-seconds inf
    bench http://there --context-lens 1,x
    bench http://there --context-lens 0
    """.strip().splitlines()
)

_TWO = """
deployments:
  - {name: linear, rope_scaling: {rope_type: linear, factor: 4.0}}
  - name: far
    rope_scaling: {rope_type: default, positions: {method: self_extend}}
    max_model_len: 1024
"""
_WORDS = "the strand a wheel turns of hemp from harbour to yard and no wind stops it"


@contextmanager
def told(embedded: Checkpoint, folder: Path) -> Iterator[dict[str, Any]]:
    """Give the commands their inputs in a folder; yield the figures that they then draw."""
    figures: dict[str, Any] = {}

    def savefig(figure: Figure, path: Path, *, dpi: float, metadata: Any = None) -> None:
        path.write_bytes(b"")
        figures[path.name] = in_words(figure, dpi) | {"metadata": metadata}

    rng = random.Random(0)  # a text, no secret
    lines = [" ".join(rng.choices(_WORDS.split(), k=rng.randint(3, 9))) for _ in range(700)]
    (folder / "text.txt").write_text("".join(f"{line} = {len(line)}\n" for line in lines))
    (folder / "two.yaml").write_text(_TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module in (subject, heads):
            patch.setattr(module, "load_model", lambda *_, **__: embedded)
        patch.setattr(Figure, "savefig", savefig)
        for name, stub in _STUBS.items():
            patch.setattr(bench_run, name, stub)
        yield figures


def produce(name: str, embedded: Checkpoint, folder: Path) -> dict[str, str]:
    """Run a command in an empty folder; return each of its outputs and files by name."""
    record = GOLDENS / name
    (folder / "out").mkdir()
    if (record / RECORD).exists():
        shutil.copy(record / RECORD, folder / "out" / RECORD)
    # A command keeps the option --help of its first call, which another test may have made alone.
    for command in (evaluate, inspect, bench):
        command._help_option = None
    with told(embedded, folder) as figures:
        ended = CliRunner().invoke(ropewalk, RUNS[name])
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    texts = {
        "code.txt": f"{ended.exit_code}\n",
        # The settings behind the options of a command's own are those of `serve`.
        "stdout.txt": re.split(r"\n(?:Configuration|Model):\n", ended.stdout)[0],
        "stderr.txt": ended.stderr,
    }
    if (folder / "numbers.json").exists():
        texts["numbers.json"] = (folder / "numbers.json").read_text()
    for path in sorted((folder / "out").iterdir()):
        if path.suffix != ".png":
            texts[path.name] = path.read_text()
    for path, figure in figures.items():
        shown = json.dumps(figure, indent=1) + "\n"
        texts[f"{path}.json"] = re.sub(r"\[[^\[\]{}]*\]", lambda each: _in_a_line(each[0]), shown)
    return {each: _timeless(text) for each, text in texts.items()}


def refusals(embedded: Checkpoint, folder: Path) -> str:
    """Return what the commands answer to options that they refuse."""
    lines = []
    with told(embedded, folder):
        for arguments in REFUSED:
            ended = CliRunner().invoke(ropewalk, arguments)
            assert isinstance(ended.exception, SystemExit), arguments
            lines += [f"$ {' '.join(arguments)}", f"{ended.exit_code} {ended.output}"]
    return "\n".join(lines)


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _timeless(text: str) -> str:
    text = re.sub(r"20\d\d-\d\d-\d\dT[\d:+]+", "STARTED", text)
    return re.sub(r"20\d\d-\d\d-\d\d", "DAY", text)


async def _find_target(*_: object) -> Target:
    return Target("http://there:8000", "demo", 2048)


async def _find_prompts(*_: object) -> IdPrompts:
    return IdPrompts([1, 2, 3], 0)


async def _read_drafted(*_: object, seen: list[int] = []) -> int:  # noqa: B006  # counts calls
    seen.append(0)
    return 3 * len(seen)


async def _run_load(
    _client: object,
    _target: object,
    _make_prompt: object,
    plan: LoadPlan,
    on_group: Callable[[Group, list[RequestRecord]], None],
) -> list[RequestRecord]:
    """Return made up times; of the longest prompts, one group fails in two ways."""
    rng = random.Random(1)  # no secret
    records: list[RequestRecord] = []
    for number, group in enumerate(plan.groups()):
        own = []
        for at in group.numbers:
            first = group.context_len / 4096 + rng.randrange(1, 20) / 1024
            times = [first]
            while len(times) < plan.output_tokens:
                times.append(times[-1] + rng.randrange(1, 9) / 512)
            outcome: Timing | Failure = Timing(
                group.context_len + at % 2, len(times), 16 * (at % 2), tuple(times), times[-1] + 0.5
            )
            if group.context_len == 1024 and at in (3, 4) and plan.output_tokens > 1:
                outcome = Failure("503 full" if at == 3 else "timeout", f"no  {at}\nroom")
            own.append(RequestRecord(group, number / 8, outcome))
        records += own
        on_group(group, own)
    return records


_STUBS: dict[str, Any] = {
    "find_target": _find_target,
    "find_prompts": _find_prompts,
    "read_drafted": _read_drafted,
    "run_load": _run_load,
}


def main() -> None:
    """Write all files again."""
    os.environ["COLUMNS"] = "80"
    embedded = load_checkpoint(EMBEDDED_MODEL)
    for name in RUNS:
        if "--anew" in sys.argv and name.startswith("eval"):
            shutil.rmtree(GOLDENS / name, ignore_errors=True)
        for _ in range(2 if "--anew" in sys.argv else 1):  # the second one finds the record
            with TemporaryDirectory() as folder:
                texts = produce(name, embedded, Path(folder))
            (GOLDENS / name).mkdir(exist_ok=True)
            for each, text in texts.items():
                (GOLDENS / name / each).write_text(text)
    with TemporaryDirectory() as folder:
        (GOLDENS / "refusals.txt").write_text(refusals(embedded, Path(folder)))


if __name__ == "__main__":
    main()
