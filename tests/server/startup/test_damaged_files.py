"""A damaged file of a checkpoint is one sentence of `config check`, with code 2."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoConfig

from ropewalk.model_runtime.formats.config_limits import impossible
from ropewalk.model_runtime.loading.config_values import text_values
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.startup.check_command import check
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written
from tests.models_page import SERVED

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
CONFIG = json.loads((EMBEDDED_MODEL / "config.json").read_text())
YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
# fields -> a part of the sentence
ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 10000, got 1000000000"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads (4), got 3"),
    ({"num_attention_heads": 6}, "num_attention_heads must divide hidden_size (256), got 6"),
    ({"hidden_size": None}, ": Field 'hidden_size' expected int, got NoneType"),
    ({"sliding_window": -5}, "sliding_window must be from 0"),
    ({"partial_rotary_factor": 3}, "partial_rotary_factor: must be <= 1, got 3"),
    ({"rope_parameters": YARN}, "'factor'"),
    ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers must be from 1 to 10000"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


def checked(model: Path) -> Result:
    """The end of the command."""
    return CliRunner().invoke(check, [str(model), "--device", "cpu"])


def refusal(model: Path) -> str:
    """The only line that the command says about a model, after exit code 2."""
    ended = checked(model)
    assert ended.exit_code == 2, ended.stdout
    (line,) = (each for each in ended.stderr.splitlines() if each.startswith("ropewalk: "))
    assert "unexpected" not in line
    return line


@pytest.mark.parametrize(("fields", "told"), ABSURD, ids=lambda each: str(each)[:40])
def test_numbers_that_no_model_has_are_refused(
    folder: Path, fields: dict[str, Any], told: str
) -> None:
    """The sentence names field, limit and value."""
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    assert told in refusal(folder)


def test_a_gguf_file_has_the_same_limits(tmp_path: Path) -> None:
    """transformers' validation of these was an unexpected error."""
    llama = next(case for case in CASES if case.name == "llama")
    metadata = {"llama.context_length": 2**32 - 1}
    path = llama.write(tmp_path / "m.gguf", Written(metadata=metadata))
    assert "max_position_embeddings must be" in refusal(path)


def test_no_published_architecture_is_refused() -> None:
    """The sizes are those that transformers has by default for each served architecture."""
    found = {name: impossible(text_values(AutoConfig.for_model(name))) for name in SERVED}
    assert not {name: each for name, each in found.items() if each is not None}


def test_text_of_a_file_is_printed_escaped(folder: Path) -> None:
    """A name could else change the title of the terminal, or hide what was said."""
    evil = "\x1b]0;pwned\x07\u202e"
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": f"{evil}.safetensors"}}))
    line = refusal(folder)
    assert r"\x1b]0;pwned\x07\u202e.safetensors" in line
    assert line.isprintable()


_VALUES = [None, True, -1, 1.5, "x", [], [[1]], {}, {"x": [1]}]


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_value_of_another_type_is_one_sentence_or_has_no_effect(folder: Path, name: str) -> None:
    """Each field in turn, and the whole file; never a traceback, and never an unexpected error."""
    path = folder / name
    whole = json.loads(path.read_text())
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
