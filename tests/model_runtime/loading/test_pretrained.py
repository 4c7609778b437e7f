"""Text is split as tokenizer.json states."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.files.pretrained import load_tokenizer
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

TEXT = "print(PORT_4821)  # -> 93175\n    def _close(self):\r\n\treturn '12 345'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen2 with a tokenizer that is not Qwen2's."""
    made = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, made)
    config = json.loads((made / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_the_stated_general_class_is_not_replaced_by_the_model_types(folder: Path) -> None:
    """AutoTokenizer alone would split by Qwen2's own pattern."""
    expected = Backend.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert load_tokenizer(folder).encode(TEXT) == expected


def test_a_broken_tokenizer_config_is_one_sentence(folder: Path) -> None:
    """The error of a broken tokenizer config names the folder, as for every other broken file."""
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=str(folder)):
        load_tokenizer(folder)
