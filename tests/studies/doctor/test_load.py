"""`ropewalk doctor --load` loads what `serve` loads, and fails with its sentence and exit code."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropewalk.model_runtime.errors import ModelError
from ropewalk.server.startup import load_service
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.processes import run_here, run_to_end

HERE = ("--port", "0", "--device", "cpu")
WEIGHT = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def without_a_weight(tensors: Tensors) -> None:
    """Remove a weight."""
    del tensors[WEIGHT]


def with_nan(tensors: Tensors) -> None:
    """Make a weight NaN, which no file's header shows."""
    tensors[WEIGHT][0, 0] = torch.nan


def with_huge(tensors: Tensors) -> None:
    """Make weights so large that every answer is NaN; each of them is finite."""
    tensors[WEIGHT].fill_(1e38)


def broken(folder: Path, spoil: Callable[[Tensors], None]) -> str:
    """Write a tiny Llama whose config is right and whose weights are not."""
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer_fast().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code and the findings by name."""
    ended = run_here("doctor", *HERE, "--json", *arguments)
    return ended.returncode, {each["name"]: each for each in json.loads(ended.stdout)["checks"]}


def test_a_model_that_works_is_loaded_checked_and_asked() -> None:
    """Each part is a line with its seconds. The embedded model is the default."""
    ended = run_here("doctor", *HERE, "--load", "--kv-cache-tokens", "1024")
    assert ended.returncode == 0, ended.stdout
    parts = [re.split("  +", line[6:], maxsplit=1) for line in ended.stdout.splitlines()[-4:]]
    assert [name for name, _ in parts] == ["model", "load", "self-check", "completion"]
    (_, model), (_, load), (_, check), (_, completion) = parts
    assert "--load" not in model
    assert re.fullmatch(r"LlamaForCausalLM on cpu in float32, \d+\.\d s", load)
    expected = r"logits within \S+ of \S+, the same bits in any batch, \d+\.\d s"
    assert re.fullmatch(expected, check)
    assert re.fullmatch(r'Hello ".+", \d+\.\d s', completion)


def test_without_load_the_model_says_what_was_not_checked() -> None:
    """No line stands for a part that was not tried."""
    code, found = findings()
    assert code == 0
    assert "not loaded: --load loads it, runs the self-check" in found["model"]["finding"]
    assert not {"load", "self-check", "completion"} & set(found)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("spoil", "part"),
    [(without_a_weight, "load"), (with_nan, "load"), (with_huge, "self-check")],
)
def test_weights_that_cannot_be_served_fail_as_in_serve(
    tmp_path: Path, spoil: Callable[[Tensors], None], part: str
) -> None:
    """Sentence and exit code are those of `serve`. The check of the model alone passes."""
    folder = broken(tmp_path, spoil)
    code, found = findings(folder, "--load")
    served = run_to_end("serve", folder, *HERE)
    sentence = " ".join(re.findall("^ropewalk: (.*)$", served.stderr, re.MULTILINE))
    assert found["model"]["status"] == "ok"
    assert list(found)[-1] == part
    assert (code, found[part]["status"]) == (served.returncode, "fail") == (2, "fail")
    assert " ".join(found[part]["finding"].splitlines()) == sentence


def test_an_error_of_the_program_has_the_exit_code_of_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line has the type and the first line of the error, and the code is 1."""

    def load_served(*_: object) -> None:
        raise RuntimeError("out of chalk\nand more")

    monkeypatch.setattr(load_service, "load_served", load_served)
    code, found = findings("--load")
    assert (code, found["load"]["finding"]) == (1, "unexpected RuntimeError: out of chalk")
    assert found["load"]["action"] == "set ROPEWALK_TRACEBACK=1 and run `serve`"

    def refused(*_: object) -> None:
        raise ModelError("no chalk")

    monkeypatch.setattr(load_service, "load_served", refused)
    code, found = findings("--load")
    assert (code, found["load"]["finding"], found["load"]["action"]) == (2, "no chalk", None)


@pytest.mark.costly
def test_a_model_that_fails_its_check_is_not_loaded(tmp_path: Path) -> None:
    """The line says so."""
    code, found = findings(str(tmp_path), "--load")
    assert code == 2
    assert found["load"]["finding"] == "not tried, because the check of the model failed"
