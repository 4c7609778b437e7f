"""`ropewalk inspect`: attention against distance, with and without weights."""

import cmath
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result

from ropewalk.cli import ropewalk
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.corpus.held_out import Document
from ropewalk.studies.inspection.heads import _sequences
from tests.checkpoints.tiny_models import tiny_model

TWO = """
deployments:
  - {name: linear, rope_scaling: {rope_type: linear, factor: 4.0}}
  - {name: static, rope_scaling: {rope_type: yarn, factor: 2.0}, rope_policy: fixed}
"""
DISTANCES = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2047]
TOKENS = 300


def run(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(ropewalk, ["inspect", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    """The JSON of the command, which is all of its standard output."""
    ended = run("--json", *arguments)
    assert ended.exit_code == 0, ended.stderr
    read: dict[str, Any] = json.loads(ended.stdout)
    return read


@pytest.fixture(autouse=True)
def _logs_elsewhere() -> Iterator[None]:
    """Undo the command's log settings, which point at the standard error of its run."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def loaded(embedded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model, loaded once for all runs."""
    monkeypatch.setattr("ropewalk.studies.inspection.heads.load_model", lambda *_, **__: embedded)


@pytest.fixture(scope="module")
def heads(embedded: Checkpoint) -> dict[str, Any]:
    """The embedded model's heads on a little text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropewalk.studies.inspection.heads.load_model", lambda *_, **__: embedded)
        return found("--heads", "all", "--sample-tokens", str(TOKENS), "--rope-tiers", "1,8")


def block(text: str, title: str) -> list[list[str]]:
    """The table under a line with this beginning, as cells; its first row is the head."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(title))
    end = lines.index("", at) if "" in lines[at:] else len(lines)
    return [line.split() for line in lines[at + 1 : end]]


def test_the_bound_is_that_of_the_tables_shown() -> None:
    """The bound follows from each tier's wavelengths and attention factor, and from no scaling."""
    deployment = found()["deployments"][0]
    decay = deployment["decay"]
    assert decay["distances"] == DISTANCES
    shown = [*zip(deployment["tiers"], decay["tiers"], strict=True)]
    assert [tier["factor"] for tier, _ in shown] == [1, 2, 4, 8]
    shown.append((deployment["tiers"][0], decay["unscaled"]))
    for tier, bounds in shown:
        thetas = [2 * math.pi / pair["wavelength"] for pair in tier["pairs"]]
        for distance, bound in zip(DISTANCES, bounds, strict=True):
            turns = [cmath.exp(1j * distance * theta) for theta in thetas]
            mean = sum(abs(sum(turns[: end + 1])) for end in range(32)) / 32
            assert bound == pytest.approx(tier["attention_factor"] ** 2 * mean, rel=1e-4)
    assert decay["tiers"][0][0] == 16.5


def test_scores_are_within_what_the_means_allow(heads: dict[str, Any]) -> None:
    """The bound is a^2 |mean q| |mean k| / sqrt(d).

    At distance 0 a score is a^2 times the native one.
    """
    deployment = heads["deployments"][0]
    rows = [row for layer in heads["heads"]["layers"] for row in layer["heads"]]
    native, scaled = deployment["scores"]["tiers"]
    lengths = [tier["attention_factor"] ** 2 for tier in deployment["tiers"]]
    for row, of_native, of_scaled in zip(rows, native, scaled, strict=True):
        for length, scores in zip(lengths, (of_native, of_scaled), strict=True):
            most = length * row["query_mean"] * row["key_mean"] / 8
            assert max(map(abs, scores["expected"])) <= most
        for name in ("expected", "spread"):
            assert of_scaled[name][0] == pytest.approx(lengths[1] * of_native[name][0])


def saved(architecture: str, folder: Path) -> str:
    """A tiny model as a checkpoint with the embedded one's tokenizer."""
    tiny_model(architecture, vocab_size=2048).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EMBEDDED_MODEL / name).read_bytes())
    return str(folder)


def test_layers_with_a_table_of_their_own_keep_it(tmp_path: Path) -> None:
    """Gemma 3's sliding layers are not scaled, and attend up to their window."""
    model = saved("gemma3_text", tmp_path)
    arguments = (model, "--heads", "2,3", "--sample-tokens", "100", "--rope-tiers", "1,4")
    deployment = found(*arguments)["deployments"][0]
    thetas = {"full_attention": 1e6, "sliding_attention": 1e4}  # transformers' defaults
    for name, bounds in (
        ("full_attention", deployment["decay"]["unscaled"]),
        ("sliding_attention", deployment["decay"]["other_layer_types"]["sliding_attention"]),
    ):
        turns = [cmath.exp(64j * thetas[name] ** (-pair / 8)) for pair in range(8)]
        mean = sum(abs(sum(turns[: end + 1])) for end in range(8)) / 8
        at = deployment["decay"]["distances"].index(64)
        assert bounds[at] == pytest.approx(mean, rel=1e-3)
    scores = deployment["scores"]
    assert {row["layer"] for row in scores["other_layers"]} == {2}
    assert all({row["layer"] for row in rows} == {3} for rows in scores["tiers"])
    for row in scores["other_layers"]:
        told = [each is not None for each in row["expected"]]
        assert told == [distance < 24 for distance in scores["distances"]]
    _, *rows = block(run(*arguments).stdout, f"deployment {tmp_path.name}, layers that")
    assert len(rows) == 4
    assert rows[0][-1] == "-"


def test_layers_without_rotation_expect_the_same_at_every_distance(tmp_path: Path) -> None:
    """Cohere 2's fourth layer has no rotation, and the plot can draw it."""
    picture = tmp_path / "out.svg"
    deployment = found(
        saved("cohere2", tmp_path), "--heads", "all", "--sample-tokens", "100", "--plot",
        str(picture),
    )["deployments"][0]  # fmt: skip
    for row in deployment["scores"]["other_layers"]:
        assert row["layer"] == 3
        assert row["expected"] == pytest.approx([row["expected"][0]] * len(row["expected"]))
    assert {row["layer"] for row in deployment["scores"]["unscaled"]} == {0, 1, 2}
    assert "<svg" in picture.read_text()


def test_a_sample_is_the_beginning_of_every_text_then_the_rest(embedded: Checkpoint) -> None:
    """Sequences have at most the given length, up to the given number of tokens."""
    texts = [Document("a", "alpha = 1\n" * 20), Document("b", "beta\n"), Document("c", "")]
    tokenizer = embedded.tokenizer
    sequences = _sequences(texts, tokenizer, 10, 1000)
    pieces = [
        texts[0].text[:40],
        "beta\n",
        *(texts[0].text[at : at + 40] for at in range(40, 200, 40)),
    ]
    assert sequences == [tokenizer.encode(piece)[:10] for piece in pieces]
    cut = _sequences(texts, tokenizer, 10, 11)
    assert [len(each) for each in cut] == [10, 1]


def test_own_text_is_read(loaded: None, tmp_path: Path) -> None:
    """A text of the user gives other statistics of the heads."""
    file = tmp_path / "mine.txt"
    file.write_text("for each in range(10):\n    print(each)\n")
    mine = found("--heads", "0", "--sample-text", str(file))["heads"]
    assert (mine["sample"], mine["num_sequences"]) == (str(file), 1)
    file.write_text("x = 1\n" * 40)
    other = found("--heads", "0", "--sample-text", str(file))["heads"]
    assert mine["layers"][0]["heads"] != other["layers"][0]["heads"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--heads", "4"],
            "--heads must be all, or layers from 0 to 3 with commas between them, got '4'",
        ),
        (["--heads", "0,-1"], "--heads must be all, or layers from 0 to 3"),
        (["--heads", "first"], "--heads must be all, or layers from 0 to 3"),
        (["--sample-text", "x"], "--sample-text is for --heads, which is not given, got x"),
        (["--sample-tokens", "9"], "--sample-tokens is for --heads, which is not given, got 9"),
        (
            ["--heads", "all", "--sample-text", "no/such"],
            "--sample-text: cannot read no/such: No such file or directory",
        ),
        (["--plot", "out.bmp"], "--plot must end in .png or .svg, got 'out.bmp'"),
        (["--plot", "no/such/out.png"], "--plot: there is no folder no/such"),
    ],
)
def test_an_option_that_cannot_be_inspected_ends_with_a_sentence_and_code_2(
    arguments: list[str], message: str
) -> None:
    """The sentence names the option, the limit and the value."""
    ended = run(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"ropewalk: {message}")
    assert len(ended.stderr.splitlines()) == 1


def test_a_sample_of_one_token_is_refused(loaded: None, tmp_path: Path) -> None:
    """A single vector has no spread; an empty text is refused too."""
    file = tmp_path / "mine.txt"
    file.write_text("")
    ended = run("--heads", "all", "--sample-text", str(file))
    assert ended.exit_code == 2
    assert "ropewalk: --sample-text must have >= 2 tokens, got 0" in ended.stderr
    ended = run("--heads", "all", "--sample-tokens", "1")
    assert ended.exit_code == 2
    assert "'--sample-tokens': 1 is not in the range x>=2" in ended.stderr


def test_a_plot_without_matplotlib_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model of this test does not exist."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = run("no/such/model", "--heads", "all", "--plot", "out.png")
    assert ended.exit_code == 2
    assert "ropewalk: --plot needs matplotlib: pip install 'matplotlib>=3.8'" in ended.stderr
