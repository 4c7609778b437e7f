"""A damaged file of a checkpoint's folder is one sentence of `config check`, with code 2."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Regex, Tokenizer, pre_tokenizers

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.startup.check_command import check

_PATIENCE_S = 60
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


def checked(folder: Path) -> Result:
    """The end of the command, which has to come."""
    results: list[Result] = []
    arguments = [str(folder), "--device", "cpu"]
    thread = threading.Thread(
        target=lambda: results.append(CliRunner().invoke(check, arguments)), daemon=True
    )
    thread.start()
    thread.join(_PATIENCE_S)
    assert results, "the command waits"
    return results[0]


@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors", "chat_template.jinja"])
def test_a_pipe_in_the_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    """Opening it would wait for a writer."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    ended = checked(folder)
    assert ended.exit_code == 2
    assert f"{folder / name} must be a file" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("weight_map", [{"a": ["b"]}, {"a": {"b": "c"}}, {"a": None}, [], 5])
def test_an_index_of_another_form_is_refused(folder: Path, weight_map: Any) -> None:
    """A list in the place of a name was an unexpected TypeError."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    ended = checked(folder)
    assert ended.exit_code == 2
    assert f"{index} is no index of weights" in ended.stderr


_VALUES = [None, True, -1, 1.5, "x", [], [[1]], {}, {"x": [1]}]


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_value_of_another_type_is_one_sentence_or_has_no_effect(folder: Path, name: str) -> None:
    """Each field in turn, and the whole file; never a traceback, and never an unexpected error."""
    path = folder / name
    text = path.read_text()
    whole = json.loads(text)
    cases: list[Any] = [*_VALUES]
    for number, key in enumerate(whole):
        cases += [{**whole, key: _VALUES[(number + step) % len(_VALUES)]} for step in (0, 4)]
    for case in cases:
        path.write_text(json.dumps(case))
        ended = checked(folder)
        shown = json.dumps(case)[:200]
        assert ended.exit_code in (0, 2), (shown, ended.stderr)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), shown
        assert "unexpected" not in ended.output, (shown, ended.output)
        assert "Traceback" not in ended.output, shown
    path.write_text(text)


def test_a_tokenizer_that_fails_on_plain_text_is_refused(folder: Path) -> None:
    """Its pattern backtracks, which is a panic of the library, on every sentence."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    split = pre_tokenizers.Split(Regex(r"^(\w+\W?)*$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.save(path)
    ended = checked(folder)
    assert ended.exit_code == 2
    assert "the tokenizer cannot encode plain text" in ended.stderr
    assert "retry-limit" in ended.stderr
