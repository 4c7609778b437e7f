"""A model that an earlier start has checked is served with the same bits, and is checked less."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from structlog.testing import capture_logs

from ropewalk.model_runtime.attention.eight_bits import digest_of
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.loading import full_check, known_check
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.self_check import SelfCheckReport
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written, quantised
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import EngineFactory, answer, deployment_of, random_tokens, request
from tests.doubles.tokens import byte_tokenizer_fast

Load = Callable[..., Checkpoint]


def folder(path: Path, architecture: str = "gemma3_text", **sizes: int) -> Load:
    """Windows, norms and caps, in the numbers of a file."""
    tiny_model(architecture, **sizes).save_pretrained(path / "model")
    byte_tokenizer_fast().save_pretrained(path / "model")
    return partial(load_checkpoint, path / "model", device="cpu", remembers=True)


# A load remembers the same facts of every model, so a small one is loaded.
one_layer = partial(folder, architecture="llama", num_hidden_layers=1)


def rounded_file(path: Path) -> Load:
    """Weights in few bits, and rounded rows."""
    case = next(case for case in CASES if case.name == "llama")
    file = case.write(path / "m.gguf", Written(encode=quantised(Type.Q8_0)))
    return partial(load_checkpoint, file, device="cpu", activations="int8", remembers=True)


def states_in_int8(path: Path) -> Load:
    """Layers with states, and weights that the load quantises."""
    return partial(folder(path, "qwen3_5_text"), weights="int8")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The models that ran untouched; checks are kept in a folder of the test."""
    found: list[str] = []
    run = full_check.original_logits

    def noted(model: Any, *rest: Any) -> Any:
        found.append(type(model).__name__)
        return run(model, *rest)

    monkeypatch.setattr(full_check, "original_logits", noted)
    monkeypatch.setattr(known_check, "kept_folder", lambda: tmp_path / "kept")
    return found


def kept(tmp_path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((tmp_path / "kept/ropewalk-self-checks.json").read_text())
    return facts


@pytest.mark.parametrize("saved", [folder, rounded_file, states_in_int8])
def test_a_later_start_has_the_same_bits_without_the_untouched_model(
    tmp_path: Path, engines: EngineFactory, untouched: list[str], saved: Callable[[Path], Load]
) -> None:
    """Also the scales of a cache in eight bits, what the banner has, and the program."""
    load = saved(tmp_path)
    checked, known = load(), load()
    assert len(untouched) == 1
    assert known.report == checked.report
    assert (known.rounding, known.distance) == (checked.rounding, checked.distance)
    assert digest_of(known.scales) == digest_of(checked.scales)
    for each in (checked, known):
        assert isinstance(vars(each.model).get("forward"), DecoderLayers)
    results = [
        answer(
            engines.over(each),
            request(deployment_of(each), random_tokens(60), max_tokens=20, logprobs=3),
        )
        for each in (checked, known)
    ]
    assert [each.logprobs for each in results[0]] == [each.logprobs for each in results[1]]


def test_a_file_that_was_written_again_is_checked_again(
    tmp_path: Path, untouched: list[str]
) -> None:
    """So are another number type, and another number of threads. Each is known afterwards."""
    load = one_layer(tmp_path)
    load()
    weights = tmp_path / "model/model.safetensors"
    os.utime(weights, ns=(1, 1))
    for _ in range(2):
        load()
    assert len(untouched) == 2
    for _ in range(2):
        load(dtype="bfloat16")
    assert len(untouched) == 3
    with threads(torch.get_num_threads() + 1):
        load()
    assert len(untouched) == 4
    assert len(kept(tmp_path)) == 4


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_other_bits_are_checked_in_full(
    tmp_path: Path, untouched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that no version of a file shows is seen in the bits, and logged.

    The model with the other bits is gone before the second one is read.
    """
    load = one_layer(tmp_path)
    load()
    read = change_weights(monkeypatch)
    with capture_logs() as logs:
        load()
    assert [each() is None for each in read] == [True, False]
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == [
        "self_check_repeated"
    ]
    assert len(untouched) == 2
    load()  # is known by its new bits
    assert len(untouched) == 2


def test_a_check_that_finds_no_batch_invariance_is_not_known(
    tmp_path: Path, untouched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier check is forgotten, or each start would read the model twice."""
    load = one_layer(tmp_path)
    load()
    change_weights(monkeypatch)
    check = full_check.check

    def varying(*args: Any) -> SelfCheckReport:
        return replace(check(*args), bitwise=False)

    monkeypatch.setattr(full_check, "check", varying)
    load()
    assert kept(tmp_path) == {}
    with capture_logs() as logs:
        load()
    assert len(untouched) == 3
    assert not [each for each in logs if each["log_level"] == "warning"]


def test_another_tokenizer_means_a_full_check(tmp_path: Path, untouched: list[str]) -> None:
    """The prompts are other ones then, and nothing is said of the model."""
    load = one_layer(tmp_path)
    load()
    file = tmp_path / "kept/ropewalk-self-checks.json"
    ((key, facts),) = kept(tmp_path).items()
    file.write_text(json.dumps({key: {**facts, "prompts": "0" * 64}}))
    with capture_logs() as logs:
        load()
    assert len(untouched) == 2
    assert not [each for each in logs if each["log_level"] == "warning"]
    load()
    assert len(untouched) == 2


def test_a_program_that_fails_is_tried_again_in_full(
    tmp_path: Path, untouched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules serve then. That may be a matter of the moment, so it is not kept."""
    load = one_layer(tmp_path)
    load()

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(DecoderLayers, "__call__", broken)
    assert "forward" not in vars(load().model)
    assert len(untouched) == 2
    monkeypatch.undo()
    monkeypatch.setattr(known_check, "kept_folder", lambda: tmp_path / "kept")
    assert isinstance(vars(load().model)["forward"], DecoderLayers)


def change_weights(monkeypatch: pytest.MonkeyPatch) -> list[ReferenceType[Any]]:
    """Change one weight of every model that is read from now on; return those that were."""
    from ropewalk.model_runtime.loading import checkpoint

    read, read_folder = [], checkpoint._read_folder

    def changed(*args: Any) -> Any:
        model = read_folder(*args)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 4] += 0.5
        read.append(ref(model))
        return model

    monkeypatch.setattr(checkpoint, "_read_folder", changed)
    return read


def test_a_damaged_file_means_a_full_check(tmp_path: Path, untouched: list[str]) -> None:
    load = one_layer(tmp_path)
    load()
    (key,) = kept(tmp_path)
    for text in ("", "{", "[1]", '{"KEY": {"digest": 1}}', '{"KEY": null}'):
        untouched.clear()
        (tmp_path / "kept/ropewalk-self-checks.json").write_text(text.replace("KEY", key))
        load()
        assert len(untouched) == 1, text
        assert [*kept(tmp_path)] == [key], text


def test_a_folder_that_cannot_be_written_costs_a_check_a_start(
    tmp_path: Path, untouched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(known_check, "kept_folder", lambda: tmp_path / "file/kept")
    load = one_layer(tmp_path)
    for _ in range(2):
        load()
    assert len(untouched) == 2


def test_a_load_in_code_is_always_checked(tmp_path: Path, untouched: list[str]) -> None:
    """`serve` alone remembers, and no model with code of its own."""
    load = one_layer(tmp_path)
    load()
    load(remembers=False)
    load(trust_remote_code=True)
    assert len(untouched) == 3
