"""`config check --load` and `doctor --load` load what `serve` loads, and fail with its sentence."""

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


def last_finding(*arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code of `doctor --load`, and its last finding."""
    ended = run_here("doctor", *HERE, "--json", "--load", *arguments)
    found: dict[str, str] = json.loads(ended.stdout)["checks"][-1]
    return ended.returncode, found


def test_a_model_that_works_is_loaded_checked_and_asked() -> None:
    """`doctor` prints the same lines below its own. The embedded model is the default."""
    flags = ("--load", "--kv-cache-tokens", "1024", *HERE)
    ended = run_here("config", "check", *flags)
    assert ended.returncode == 0, ended.stderr
    *_, check, completion = ended.stdout.splitlines()
    assert check == "  self-check       passed; batch invariance to the bit"
    assert re.fullmatch(r'  completion       Hello ".+"', completion)
    assert ended.stdout in run_here("doctor", *flags).stdout


@pytest.mark.parametrize("spoil", [without_a_weight, with_nan, with_huge])
def test_weights_that_cannot_be_served_fail_as_in_serve(
    tmp_path: Path, spoil: Callable[[Tensors], None]
) -> None:
    """Sentence and exit code are those of `serve`. The check without a load passes."""
    folder = broken(tmp_path, spoil)
    assert run_here("config", "check", folder, *HERE).returncode == 0
    code, found = last_finding(folder)
    served = run_to_end("serve", folder, *HERE)
    sentence = " ".join(re.findall("^ropewalk: (.*)$", served.stderr, re.MULTILINE))
    assert (code, found["status"], found["finding"]) == (2, "fail", sentence)
    assert served.returncode == 2


def test_an_error_of_the_program_has_the_exit_code_of_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line has the type and the first line of the error, and the code is 1."""

    def load_served(*_: object) -> None:
        raise RuntimeError("out of chalk\nand more")

    monkeypatch.setattr(load_service, "load_served", load_served)
    code, found = last_finding()
    assert (code, found["finding"]) == (1, "unexpected RuntimeError: out of chalk")
    assert found["action"] == "set ROPEWALK_TRACEBACK=1 and run `serve`"

    def refused(*_: object) -> None:
        raise ModelError("no chalk")

    monkeypatch.setattr(load_service, "load_served", refused)
    code, found = last_finding()
    assert (code, found["finding"], found["action"]) == (2, "no chalk", None)
