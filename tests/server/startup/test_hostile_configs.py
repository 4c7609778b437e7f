"""`config check` and `serve` refuse a config that cannot be right with one sentence, at once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ropewalk.model_runtime.formats.config_limits import impossible
from ropewalk.model_runtime.loading.config_values import text_values
from ropewalk.model_runtime.loading.files.folder_files import INDEX, SINGLE
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written
from tests.models_page import SERVED
from tests.server.test_light_imports import run
from tests.servers.processes import run_here

CONFIG = json.loads((EMBEDDED_MODEL / "config.json").read_text())
YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
# fields -> a part of the sentence
ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 10000, got 1000000000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to 10000, got 0"),
    ({"num_attention_heads": 0}, "num_attention_heads must be from 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be from 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads (4), got 3"),
    ({"num_attention_heads": 6}, "num_attention_heads must divide hidden_size (256), got 6"),
    ({"head_dim": 0}, "head_dim must be from 1"),
    ({"hidden_size": 0}, "hidden_size must be from 1"),
    ({"hidden_size": None}, ": Field 'hidden_size' expected int, got NoneType"),
    ({"intermediate_size": 0}, "intermediate_size must be from 1"),
    ({"vocab_size": 0}, "vocab_size must be from 1"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings must be from 1 to 2147483647"),
    ({"sliding_window": -5}, "sliding_window must be from 0"),
    ({"partial_rotary_factor": 3}, "partial_rotary_factor: must be <= 1, got 3"),
    ({"rope_parameters": YARN}, "'factor'"),
    ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers must be from 1 to 10000"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


def refusal(model: Path, tmp_path: Path) -> str:
    """The only line that `config check` says about a model, after exit code 2."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {model}\ndevice: cpu\n")
    ended = run_here("config", "check", str(file))
    assert ended.returncode == 2, ended.stdout
    (line,) = (each for each in ended.stderr.splitlines() if each.startswith("ropewalk: "))
    assert "unexpected" not in line
    return line


@pytest.mark.parametrize(("fields", "told"), ABSURD, ids=lambda each: str(each)[:40])
def test_numbers_that_no_model_has_are_refused(
    model: Path, tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    """The sentence names field, limit and value."""
    (model / "config.json").write_text(json.dumps(CONFIG | fields))
    assert told in refusal(model, tmp_path)


def test_serve_says_the_same_before_torch_is_imported(model: Path, tmp_path: Path) -> None:
    """The count of layers kept `config check` busy for ever."""
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**9}))
    assert "num_hidden_layers must be from 1" in refusal(model, tmp_path)


def test_a_missing_chat_template_is_told_before_the_port_answers(tmp_path: Path) -> None:
    """The sentence is that of `config check`."""
    path = tmp_path / "missing.jinja"
    output, last = run("serve", "--port", "0", "--chat-template", str(path))
    assert last == "code 2 imported []"
    told = f"ropewalk: chat_template: cannot read {path}: No such file or directory"
    assert output.splitlines()[0] == told
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"chat_template: {path}\n")
    assert run_here("config", "check", str(file)).stderr.splitlines() == [told]


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX]
)
@pytest.mark.parametrize("depth", [80, 5_000])
def test_json_is_not_nested_deeper_than_a_model_needs(
    model: Path, tmp_path: Path, name: str, depth: int
) -> None:
    """Python's own limit is reached somewhere else for each depth."""
    if name == INDEX:
        (model / SINGLE).rename(model / "part.safetensors")
    (model / name).write_text('{"a":' * depth + "1" + "}" * depth)
    assert refusal(model, tmp_path).endswith(
        f"{name} must have at most 64 levels of lists and objects"
    )


@pytest.mark.parametrize("names", [{}, {"a": "x" * 5_000}, {"a": 3}, {"a": ""}, []])
def test_an_index_names_files(model: Path, tmp_path: Path, names: Any) -> None:
    """A name may have as many characters as a file's."""
    (model / SINGLE).rename(model / "part.safetensors")
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert refusal(model, tmp_path).endswith(f"{INDEX} is no index of weights")


@pytest.mark.parametrize(
    ("rest", "got"), [({}, "None"), ({"metadata": None}, "None"), ({"metadata": [3]}, "[3]")]
)
def test_an_index_has_metadata(model: Path, tmp_path: Path, rest: dict[str, Any], got: str) -> None:
    """Without it, transformers raised a KeyError after the imports."""
    (model / SINGLE).rename(model / "part.safetensors")
    index = {"weight_map": {"lm_head.weight": "part.safetensors"}}
    (model / INDEX).write_text(json.dumps(index | rest))
    told = refusal(model, tmp_path)
    assert f"{INDEX}: metadata must be an object, such as {{}}, got {got}" in told


def test_text_of_a_file_is_printed_escaped(model: Path, tmp_path: Path) -> None:
    """A name could else change the title of the terminal, or hide what was said."""
    evil = "\x1b]0;pwned\x07\u202e"
    (model / SINGLE).rename(model / "part.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": f"{evil}.safetensors"}}))
    line = refusal(model, tmp_path)
    assert r"\x1b]0;pwned\x07\u202e.safetensors" in line
    assert line.isprintable()


def test_a_long_error_is_shortened(model: Path, tmp_path: Path) -> None:
    """Its beginning names the file, and its end what is accepted."""
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": "9" * 100_000}))
    assert len(refusal(model, tmp_path)) < 2_100


LLAMA = next(case for case in CASES if case.name == "llama")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Written(metadata={"llama.context_length": 2**32 - 1}), "max_position_embeddings must be"),
        (Written(metadata={"llama.attention.head_count": 2**32 - 1}), "num_attention_heads must"),
        (Written(metadata={"llama.attention.head_count": 3}), "must divide"),
        (Written(metadata={"llama.embedding_length": 3}), "must divide hidden_size (3)"),
        (
            Written(metadata={"tokenizer.ggml.token_type": [-99] * 300}),
            "tokenizer.ggml.token_type must be from 0 to 6, got -99",
        ),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_gguf_file_has_the_same_limits(tmp_path: Path, change: Written, told: str) -> None:
    """transformers' validation of these was an unexpected error."""
    assert told in refusal(LLAMA.write(tmp_path / "m.gguf", change), tmp_path)


def test_no_published_architecture_is_refused() -> None:
    """The sizes are those that transformers has by default for each served architecture."""
    found = {name: impossible(text_values(AutoConfig.for_model(name))) for name in SERVED}
    assert not {name: each for name, each in found.items() if each is not None}
