"""Damaged, foreign and unusual GGUF files, and the choice of a file in a folder."""

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf import gguf_file as file
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_weights import find_gguf
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written, byte_vocabulary, same_weights
from tests.servers.processes import run_here

LLAMA = next(case for case in CASES if case.name == "llama")
QWEN2 = next(case for case in CASES if case.name == "qwen2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without faults."""
    return LLAMA.write(tmp_path_factory.mktemp("whole") / "whole.gguf")


def changed(whole: Path, path: Path, at: int, new: bytes) -> Path:
    """A copy with other bytes in one place."""
    data = bytearray(whole.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(bytes(data))
    return path


def test_metadata_are_those_of_ggufs_own_reader(whole: Path) -> None:
    """Values, shapes and places; a float32 is the decimal that was given."""
    file, reader = read_gguf(whole), gguf.GGUFReader(whole)
    own = {key: value for key, value in file.metadata.items() if not isinstance(value, float)}
    theirs = {key: entry.contents() for key, entry in reader.fields.items()}
    assert own == {key: theirs[key] for key in own}
    assert len(file.metadata) == len(theirs) - 3  # beside them, its reader lists the header
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.type_name) == (tensor.data_offset, tensor.tensor_type.name)
    assert set(file.tensors) == {tensor.name for tensor in reader.tensors}


@pytest.mark.parametrize(
    ("at", "new", "sentence"),
    [
        (0, b"PK\x03\x04", "is no GGUF file: it does not begin with GGUF"),
        (4, struct.pack(">I", 3), "is big-endian.*gguf-convert-endian"),
        (4, struct.pack("<I", 1), "is GGUF version 1; versions 2 and 3 are read"),
        (16, struct.pack("<Q", 1 << 60), "is truncated: its header needs"),
        (8, struct.pack("<Q", 1 << 60), "is truncated|dimensions"),
        (24, struct.pack("<Q", 1 << 62), "is truncated: its header needs"),
    ],
    ids=["magic", "endian", "version", "keys", "tensors", "text"],
)
def test_a_damaged_header_is_one_sentence(
    whole: Path, tmp_path: Path, at: int, new: bytes, sentence: str
) -> None:
    """Every sentence names the file."""
    path = changed(whole, tmp_path / "bad.gguf", at, new)
    with pytest.raises(ModelError, match=rf"bad\.gguf.*({sentence})"):
        read_model_config(path, device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.999])
def test_a_truncated_file_is_named(whole: Path, tmp_path: Path, share: float) -> None:
    """A download may end anywhere, in the header or in the weights."""
    data = whole.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"short\.gguf.*(truncated|no GGUF file)"):
        read_model_config(path, device="cpu")


def test_any_byte_of_a_header_may_be_wrong(whole: Path, tmp_path: Path) -> None:
    """A flipped byte gives a sentence or another model, never an error of another type."""
    end = read_gguf(whole).tensors["token_embd.weight"].offset
    generator = np.random.default_rng(0)
    sentences = []
    for at in generator.integers(0, end, size=150):
        new = bytes([int(generator.integers(0, 256))])
        path = changed(whole, tmp_path / "flipped.gguf", int(at), new)
        try:
            outline = read_model_config(path, device="cpu")
            outline.native(), outline.layers(), outline.num_weight_bytes()
        except ModelError as error:
            sentences.append(str(error))
    assert len(sentences) > 10
    assert not [each for each in sentences if "\n" in each]


UNREAD = {
    "architecture": ({"general.architecture": "rwkv6"}, "general.architecture rwkv6 is not read"),
    "no blocks": ({"llama.block_count": None}, "llama.block_count must be an integer >= 1"),
    "per layer": ({"llama.attention.head_count_kv": [2, 2, 1, 2]}, "head_count_kv differs"),
    "no tokenizer": ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
    "other tokenizer": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model rwkv is not"),
    "no pre": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
    "other pre": ({"tokenizer.ggml.pre": "afmoe"}, "tokenizer.ggml.pre afmoe is not read"),
    "no merges": ({"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges"),
    "empty merge": ({"tokenizer.ggml.merges": ["a b", ""]}, "merges do not .*: entry 1 is ''"),
    "long merge": (
        {"tokenizer.ggml.merges": ["a <|begin|>"]},
        "do not fit the tokens: entry 0 is 'a <",
    ),
    "too many tokens": (
        byte_vocabulary(301),
        "tokens has 301 entries, and token_embd.weight has 300 rows",
    ),
    "token types": ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries, 300"),
    "token id": ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id must be < 300, got 5000"),
    "no bos": (
        {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
        "add_bos_token is set without a bos_token_id",
    ),
    "template": ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a text"),
    "more layers": ({"llama.block_count": 6}, r"has no tensor blk\.4\..*which architecture llama"),
    "a billion layers": ({"llama.block_count": 10**9}, "llama.block_count is 1000000000, and"),
    "fewer layers": ({"llama.block_count": 3}, r"tensor blk\.3\..* has no place"),
    "other heads": ({"llama.attention.head_count": 8}, r"has shape \[64, 64\], the metadata give"),
}


@pytest.mark.parametrize(("metadata", "sentence"), UNREAD.values(), ids=UNREAD)
def test_metadata_that_cannot_be_served_are_one_sentence(
    tmp_path: Path, metadata: dict[str, Any], sentence: str
) -> None:
    """Loading names the file and the key or tensor."""
    path = LLAMA.write(tmp_path / "odd.gguf", Written(metadata=metadata))
    with pytest.raises(ModelError, match=rf"odd\.gguf.*{sentence}"):
        load_checkpoint(path, device="cpu")


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("blk.1.attn_q.weight", None, r"has no tensor blk\.1\.attn_q\.weight"),
        ("token_embd.weight", None, r"no tensor token_embd\.weight"),
        ("blk.0.attn_q.scale", np.ones(4, np.float32), r"blk\.0\.attn_q\.scale has no place"),
        (
            "blk.2.attn_q.weight",
            np.full((64, 64), np.nan, np.float32),
            r"tensor blk\.2\.attn_q\.weight has NaN or Inf",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, name: str, tensor: Any, sentence: str
) -> None:
    """The weights and the metadata must describe one model, and be numbers."""
    path = LLAMA.write(tmp_path / "a.gguf", Written(tensors={name: tensor}))
    with pytest.raises(ModelError, match=rf"a\.gguf.*{sentence}"):
        load_checkpoint(path, device="cpu")


def test_another_epsilon_of_olmo_is_refused(tmp_path: Path) -> None:
    """It is a constant in transformers."""
    olmo = next(case for case in CASES if case.name == "olmo")
    written = Written(metadata={"olmo.attention.layer_norm_epsilon": 1e-6})
    with pytest.raises(ModelError, match="layer_norm_epsilon must be 1e-05"):
        read_model_config(olmo.write(tmp_path / "a.gguf", written), device="cpu")


def test_an_unread_number_type_is_named(whole: Path, tmp_path: Path) -> None:
    """Type 9 (Q8_1) exists, and 200 does not."""
    name = b"token_embd.weight"
    at = whole.read_bytes().index(name) + len(name) + 4 + 2 * 8
    for number, text in ((9, "Q8_1"), (200, "200")):
        path = changed(whole, tmp_path / "t.gguf", at, struct.pack("<I", number))
        with pytest.raises(ModelError, match=f"token_embd.weight has number type {text}, which"):
            read_model_config(path, device="cpu")


def split(folder: Path) -> list[Path]:
    """Write a model in several parts with gguf's own writer."""
    whole = read_gguf(LLAMA.write(folder / "whole.gguf"))
    writer = gguf.GGUFWriter(folder / "parts.gguf", "llama", split_max_tensors=12)
    for tensor in gguf.GGUFReader(whole.path).tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for key, value in whole.metadata.items():
        if key == "general.architecture":
            continue
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kind[type(value)]}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole.path.unlink()
    return sorted(folder.glob("parts-*.gguf"))


def test_all_parts_of_a_split_file_are_loaded(tmp_path: Path) -> None:
    """By the folder, by the first part, and by any part."""
    parts = split(tmp_path)
    assert len(parts) > 2
    for source in (tmp_path, parts[0], parts[1]):
        loaded = load_checkpoint(source, device="cpu")
        assert loaded.vocab_size == 300
    from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config, load_gguf_model

    loaded_model = load_gguf_model(parts[0], gguf_config(parts[0]), loaded.dtype)
    assert same_weights(loaded_model, LLAMA.model())


def test_a_header_is_read_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any part may be written again, and the files' own times say so."""
    parts = split(tmp_path)
    read: list[Path] = []
    read_part = file._read_part

    def noted(path: Path) -> Any:
        read.append(path)
        return read_part(path)

    monkeypatch.setattr(file, "_read_part", noted)
    first = read_gguf(parts[0])
    assert read_gguf(parts[0]) is first
    assert read == parts
    os.utime(parts[1], ns=(0, 0))
    again = read_gguf(parts[0])
    assert again is not first
    assert (again.metadata, again.tensors) == (first.metadata, first.tensors)
    parts[2].unlink()
    with pytest.raises(ModelError, match=f"and {parts[2].name} is not beside it"):
        read_gguf(parts[0])


def test_a_part_that_is_missing_or_renamed_is_named(tmp_path: Path) -> None:
    """By the folder, and by a part's own path; parts are found by their names."""
    parts = split(tmp_path)
    parts[1].rename(tmp_path / "kept")
    with pytest.raises(ModelError, match=rf"and {parts[1].name} is not beside it"):
        read_model_config(tmp_path, device="cpu")
    renamed = parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"is one of \d parts.*does not end in -00001-of-"):
        read_gguf(renamed)
    (tmp_path / "kept").rename(parts[1])
    for each in (renamed, *parts[2:]):
        each.unlink()
    expected = f"{parts[1]} is a part of a split model, and {parts[0].name} is not beside it"
    for source in (tmp_path, parts[1]):
        with pytest.raises(ModelError) as caught:
            read_model_config(source, device="cpu")
        assert str(caught.value) == expected


def test_a_folder_with_the_name_of_a_file_is_named(tmp_path: Path) -> None:
    """It cannot be read."""
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"folder\.gguf cannot be read: Is a directory"):
        find_gguf(tmp_path)


def test_a_folders_only_file_is_found(tmp_path: Path) -> None:
    """An image encoder beside it is no model; several models need a choice."""
    assert find_gguf(tmp_path) is None
    one = LLAMA.write(tmp_path / "one.gguf")
    (tmp_path / "mmproj-one.gguf").write_bytes(one.read_bytes())
    assert find_gguf(tmp_path) == one
    two = QWEN2.write(tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF models \(one.gguf, two.gguf\).*gguf_file"):
        find_gguf(tmp_path)
    assert find_gguf(tmp_path, "two.gguf") == two
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path, "one.gguf") == one


def test_a_bad_choice_ends_with_code_2_and_a_sentence(tmp_path: Path) -> None:
    """On the command line, as in the environment."""
    LLAMA.write(tmp_path / "one.gguf")
    (tmp_path / "note.txt").write_text("no model")
    cases = {
        (str(tmp_path), "--gguf-file", "three.gguf"): "has no file three.gguf (gguf_file)",
        (str(tmp_path / "one.gguf"), "--gguf-file", "one.gguf"): "is a file already",
        ("owner/name", "--gguf-file", "one.gguf"): "is no folder here",
        (str(tmp_path / "note.txt"),): "is no GGUF file",
        (str(tmp_path / "two.gguf"),): f"there is no file {tmp_path}/two.gguf",
    }
    for arguments, sentence in cases.items():
        ended = run_here("inspect", *arguments, "--device", "cpu")
        assert ended.returncode == 2
        assert sentence in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1
    chosen = run_here("inspect", str(tmp_path), "--gguf-file", "one.gguf", "--device", "cpu")
    assert chosen.returncode == 0
