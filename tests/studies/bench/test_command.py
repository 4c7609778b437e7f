"""`ropewalk bench` against our own server, and the arithmetic of its report."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.studies.bench.command import bench
from ropewalk.studies.bench.plan import BenchError, LoadPlan, choose_context_lens
from ropewalk.studies.bench.target import IdPrompts, WordPrompts
from tests.servers.processes import Server, run_here

pytestmark = pytest.mark.alone

BUCKETS = {64: "64", 512: "512", 2032: "2048"}  # context length -> the server's label
REQUESTS, WARMUP, OUTPUT = 3, 1, 4


def run(*arguments: str) -> Result:
    """Run the command in this process."""
    ended = CliRunner().invoke(bench, arguments)
    assert isinstance(ended.exception, SystemExit | None)  # a bug would look like code 1
    return ended


def samples(server: Server, name: str) -> dict[str, float]:
    """context_bucket -> value."""
    page = httpx.get(f"{server.url}/metrics").text
    return {
        sample.labels["context_bucket"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"ropewalk_{name}"
    }


@dataclass(frozen=True)
class Run:
    """One run of the command, and the server's metrics before and after it."""

    ended: subprocess.CompletedProcess[str]
    report: dict[str, Any]
    counted: Callable[[str], dict[str, float]]


@pytest.fixture(scope="module")
def measured(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with three lengths, three requests each and one to warm up."""
    folder = tmp_path_factory.mktemp("bench")
    names = [
        f"{metric}_seconds_{kind}"
        for metric in ("time_to_first_token", "inter_token_latency")
        for kind in ("count", "sum")
    ]
    before = {name: samples(server, name) for name in names}
    ended = run_here(
        "bench", f"{server.url}/v1/", "--context-lens", "2032,64,512",
        "--requests", str(REQUESTS), "--warmup", str(WARMUP), "--output-tokens", str(OUTPUT),
        "--json", str(folder / "out.json"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    after = {name: samples(server, name) for name in names}

    def counted(name: str) -> dict[str, float]:
        found = {
            bucket: after[name][bucket] - before[name].get(bucket, 0) for bucket in after[name]
        }
        return {bucket: value for bucket, value in found.items() if value}

    report = json.loads((folder / "out.json").read_text())
    return Run(ended, report, counted)


def test_every_request_of_the_report_is_one_that_the_server_counted(measured: Run) -> None:
    """The counts by context length and the gaps between tokens are compared."""
    sent = {BUCKETS[each["context_len"]]: each["requests"] for each in measured.report["results"]}
    counts = {bucket: len(requests) for bucket, requests in sent.items()}
    assert counts == measured.counted("time_to_first_token_seconds_count")
    assert set(counts.values()) == {REQUESTS + WARMUP}
    gaps = sum(len(each["inter_token_s"]) for requests in sent.values() for each in requests)
    assert gaps == sum(measured.counted("inter_token_latency_seconds_count").values())
    assert gaps == 3 * (REQUESTS + WARMUP) * (OUTPUT - 1)


def test_the_client_cannot_see_a_first_token_before_the_server_has_it(measured: Run) -> None:
    """The client sees four first tokens less than half a second later in all."""
    of_server = measured.counted("time_to_first_token_seconds_sum")
    for each in measured.report["results"]:
        seen = sum(request["time_to_first_token_s"] for request in each["requests"])
        assert of_server[BUCKETS[each["context_len"]]] < seen
        assert seen < of_server[BUCKETS[each["context_len"]]] + 0.5


def test_the_prompts_have_the_length_that_was_asked_for(measured: Run) -> None:
    """Prompts have the exact length, and no token comes from the prefix cache."""
    for each in measured.report["results"]:
        assert {request["prompt_tokens"] for request in each["requests"]} == {each["context_len"]}
        assert {request["completion_tokens"] for request in each["requests"]} == {OUTPUT}
        assert {request["cached_tokens"] for request in each["requests"]} == {0}


def test_failed_requests_are_counted_and_told(server: Server, tmp_path: Path) -> None:
    """A run with failed requests exits with code 1, without averages and without a plot."""
    picture = tmp_path / "out.svg"
    ended = run(
        server.url, "--rope", '{"rope_type": "magic"}', "--context-lens", "64,128",
        "--requests", "2", "--json", "-", "--plot", str(picture),
    )  # fmt: skip
    assert ended.exit_code == 1
    report = json.loads(ended.stdout)
    assert report["num_failed"] == 6
    for each in report["results"]:
        assert each["failures"] == {"400 invalid_request_error": 3}
        assert each["time_to_first_token_s"] is each["output_tokens_per_s"] is None
        assert "`rope.rope_type` must be one of" in each["requests"][0]["failure"]["message"]
    assert "failed: 6 x 400 invalid_request_error: `rope.rope_type` must" in ended.stderr
    assert not picture.exists()
    assert f"{picture} is not drawn: nothing was measured" in ended.stderr


def test_one_point_can_be_drawn(server: Server, tmp_path: Path) -> None:
    """A single output token leaves no gaps between tokens."""
    picture = tmp_path / "out.svg"
    ended = run(
        server.url, "--context-lens", "64", "--requests", "1", "--output-tokens", "1",
        "--plot", str(picture),
    )  # fmt: skip
    assert ended.exit_code == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "--model must be a served name (ropewalk-demo), got 'x'"),
        (
            ["--context-lens", "64,2034"],
            "--context-lens must be <= 2033 tokens (max_model_len 2048 - 16 output tokens + 1)",
        ),
        (["--output-tokens", "2048"], "--output-tokens must be < 2048 (the model's max_model_len)"),
        (["--api-key", "k\u00e9"], "--api-key must be printable ASCII"),
    ],
)
def test_a_load_that_cannot_begin_ends_with_a_sentence_and_code_2(
    server: Server, arguments: list[str], message: str
) -> None:
    """The sentence names the option, the limit and the value."""
    ended = run(server.url, *arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"ropewalk bench: {message}")
    assert len(ended.stderr.splitlines()) == 1


def test_the_longest_context_that_fits_is_accepted(server: Server) -> None:
    """The limit of a context is prompt + output - 1 positions, as in the refusal."""
    ended = run(server.url, "--context-lens", "2033", "--requests", "1", "--warmup", "0")
    assert ended.exit_code == 0, ended.stderr


def test_the_command_waits_for_neither_torch_nor_its_own_client() -> None:
    """Matplotlib is not imported before the plot either."""
    unused = "print({'torch', 'httpx', 'matplotlib'} & {*sys.modules})"
    code = f"import sys, ropewalk.studies.bench; {unused}"
    load = "import sys, ropewalk.studies.bench.run; print({'torch', 'matplotlib'} & {*sys.modules})"
    for each in (code, load):
        ended = subprocess.run(
            [sys.executable, "-c", each], capture_output=True, text=True, check=True
        )
        assert ended.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("max_model_len", "output", "expected"),
    [
        (2048, 16, [64, 128, 256, 512, 1024, 2032]),
        (131_072, 256, [64 * 2**power for power in range(11)] + [130_816]),
        (40, 16, [24]),
    ],
)
def test_default_lengths_double_up_to_the_longest(
    max_model_len: int, output: int, expected: list[int]
) -> None:
    """The longest length is always included, and no other length is close to it."""
    found = choose_context_lens((), max_model_len, output)
    assert list(found) == expected
    assert all(late / early > 4 / 3 for early, late in itertools.pairwise(found))


def test_a_server_that_hides_its_longest_context_needs_lengths() -> None:
    """Given lengths are then accepted unchecked."""
    with pytest.raises(BenchError, match="does not report its max_model_len: give --context-lens"):
        choose_context_lens((), None, 16)
    assert choose_context_lens((8, 9), None, 16) == (8, 9)


def test_groups_send_every_request_once() -> None:
    """The warm-up comes first, and the last group is the remainder."""
    plan = LoadPlan((64, 128), 16, 5, 2, 3, seed=0, timeout_s=1, rope=None)
    groups = list(plan.groups())
    assert [len(each.numbers) for each in groups] == [2, 2, 1, 1, 2, 2, 2, 2, 1, 1]
    assert [each.is_warmup for each in groups] == [True] * 4 + [False] * 6
    assert {each.round + 1 for each in groups} == set(range(1, plan.num_rounds + 1))
    for length in plan.context_lens:
        numbers = [at for each in groups if each.context_len == length for at in each.numbers]
        assert numbers == list(range(8))


def test_prompts_are_the_seeds_but_for_their_beginning() -> None:
    """A new beginning in every run keeps the prefix cache from answering the second run."""
    ids = range(100, 400)
    one, again, other = IdPrompts(ids, 1), IdPrompts(ids, 1), IdPrompts(ids, 2)
    first, second = one(64, 0).content, again(64, 0).content
    assert first[8:] == second[8:]
    assert first[:8] != second[:8]
    assert first[8:] != one(64, 1).content[8:]
    assert first[8:] != other(64, 0).content[8:]
    assert all(len(one(length, 0).content) == length for length in (1, 7, 8, 9, 64))
    assert set(first) <= set(ids)


@pytest.mark.parametrize("length", [64, 4000])
def test_words_come_close_to_the_length(length: int) -> None:
    """A word counts 1.5 tokens."""
    prompt = WordPrompts(1.5, 0)(length, 0).content
    assert isinstance(prompt, str)
    assert length - 10 <= 1.5 * len(prompt.split()) <= length


def test_every_option_and_field_is_documented(measured: Run) -> None:
    """Each row of docs/guide/bench.md also states the default."""
    page = (Path(__file__).parents[3] / "docs/guide/bench.md").read_text()
    for option in bench.params:
        if option.opts != ["url"]:
            (row,) = re.findall(rf"^\| `{option.opts[0]}` \|.*", page, re.MULTILINE)
            if isinstance(option.default, int):
                assert f"| {option.default} |" in row
    result = measured.report["results"][0]
    objects = (measured.report, measured.report["settings"], result, result["requests"][0])
    for name in [*itertools.chain(*objects), *result["end_to_end_s"]]:
        assert f"`{name}`" in page, name
