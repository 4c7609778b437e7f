"""What a checkpoint says about generation is used within the limits of requests, or left out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.generation_config import GenerationDefaults, generation_of
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL, read_model_config
from ropewalk.model_runtime.sampling_limits import SAMPLING_LIMITS
from ropewalk.server.api.completion_schema import CompletionRequest
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written

# (field, value as it is in the file, what the sentence says about it)
UNUSABLE = [
    ("temperature", '"0.7"', "must be a number from 0 to 2, got '0.7'"),
    ("temperature", "NaN", "got nan"),
    ("top_p", '"0.9"', "must be a number above 0 and at most 1, got '0.9'"),
    ("top_k", "20.5", "must be an integer of at least -1, got 20.5"),
    ("min_p", "2", "must be a number from 0 to 1, got 2"),
    ("repetition_penalty", "0", "must be a number from 0.01 to 10, got 0"),
    ("repetition_penalty", "1e999", "got inf"),
    ("eos_token_id", '"</s>"', "must have token ids from 0 to 2047, got '</s>'"),
    ("eos_token_id", "[[7, 9]]", "got [7, 9]"),
    ("eos_token_id", '{"a": 1}', "got {'a': 1}"),
    ("eos_token_id", "[2048, -1, true, 7.0]", "got 2048, -1, True, 7.0"),
    ("eos_token_id", json.dumps(["x" * 999] * 99), "xxx..., 'xxx"),
]
JSON = st.one_of(
    st.floats(),
    st.integers(),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.floats(), max_size=2),
)
NEAR = st.sampled_from(
    [-2, -1, -0.0, 0, 0.009, 0.01, 1, 1.0, 1.001, 2, 2.001, 10, 10.1, 2**63 - 1, 2**63]
)


def read(folder: Path) -> GenerationDefaults:
    return generation_of(read_model_config(folder, device="cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


@pytest.mark.parametrize(("field", "value", "told"), UNUSABLE, ids=lambda each: str(each)[:30])
def test_an_unusable_value_is_left_out_and_named(
    folder: Path, field: str, value: str, told: str
) -> None:
    """The sentence has the file, the field, the limit and the value; other fields are used."""
    others = {"min_p": 0.5, "top_k": 7}
    others.pop(field, None)
    text = json.dumps(others)[:-1] + f', "{field}": {value}}}'
    (folder / "generation_config.json").write_text(text)
    found = read(folder)
    (sentence,) = found.left_out
    assert sentence.startswith(f"generation_config.json: {field} must ")
    assert told in sentence
    assert len(sentence) < 800
    assert found.end_ids == frozenset()
    assert found.sampling == others


def test_the_usable_end_tokens_of_a_list_are_used(folder: Path) -> None:
    """Null is as if the field were absent."""
    file = folder / "generation_config.json"
    file.write_text('{"eos_token_id": [7, "x", 9, 2047, 2048], "temperature": null}')
    found = read(folder)
    assert found.end_ids == {7, 9, 2047}
    assert [each.partition("got ")[2] for each in found.left_out] == [
        "'x', 2048; left out, and the other end tokens apply"
    ]
    assert load_checkpoint(folder, device="cpu").eos_token_ids == {1, 7, 9, 2047}


@pytest.mark.parametrize("text", ["", "[1]", "{", '"a"', "\xff"])
def test_a_file_that_is_no_object_is_named(folder: Path, text: str) -> None:
    """The end token is then that of config.json, as without the file."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    (folder / "generation_config.json").write_text(text, encoding="latin-1")
    found = read(folder)
    assert found.left_out == ("generation_config.json is no JSON object; it is left out",)
    assert found.end_ids == {9}
    (folder / "generation_config.json").unlink()
    assert read(folder) == GenerationDefaults({}, frozenset({9}), ())


def test_fields_that_are_not_used_stop_no_load(folder: Path) -> None:
    """transformers refuses some of them."""
    stated = {"max_new_tokens": "x", "cache_implementation": "x", "pad_token_id": [], "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    loaded = load_checkpoint(folder, device="cpu")
    assert loaded.sampling_defaults == {"top_k": 7}
    assert loaded.left_out == ()


@settings(deadline=None)
@given(name=st.sampled_from(sorted(SAMPLING_LIMITS)), value=st.one_of(JSON, NEAR))
def test_a_file_may_say_what_a_request_may(name: str, value: Any) -> None:
    """The request's schema is pydantic's, which is asked for each value."""
    try:
        CompletionRequest.model_validate_json(json.dumps({"prompt": "a", name: value}))
        is_valid = True
    except ValidationError:
        is_valid = False
    assert SAMPLING_LIMITS[name].admits(value) == is_valid


def test_a_gguf_file_is_read_by_the_same_limits(tmp_path: Path) -> None:
    """Its sentence has the file's own key."""
    case = next(case for case in CASES if case.name == "qwen2")
    stated = {"general.sampling.temp": -1.0, "general.sampling.top_k": 20}
    path = case.write(tmp_path / "m.gguf", Written(metadata=stated))
    loaded = load_checkpoint(path, device="cpu")
    assert loaded.sampling_defaults == {"top_k": 20}
    assert type(loaded.sampling_defaults["top_k"]) is int
    (sentence,) = loaded.left_out
    assert sentence.startswith(
        "m.gguf: general.sampling.temp must be a number from 0 to 2, got -1.0; left out"
    )
