"""Keys and identities outlive releases, so their bytes are pinned."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels import trials
from ropewalk.model_runtime.engine.kv_disk.identity import (
    ChangedError,
    WeightFiles,
    arithmetic_facts,
    identity_of,
)
from ropewalk.model_runtime.loading import checkpoint
from ropewalk.model_runtime.loading.files import file_versions as file_versions_module
from ropewalk.model_runtime.loading.files.file_versions import file_versions, version_of
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.scheduling.prefix_cache import canonical, next_key, root_key
from ropewalk.rope import LongRope, Profile, ReRope, Unscaled, Yarn


def noted(source: Path) -> WeightFiles:
    """The files as they are now."""
    if source.is_dir():
        return WeightFiles(source, file_versions(source))
    return WeightFiles(source, parts_of(source))


YARN = Yarn(factor=4.0, original_max_position_embeddings=2048)


def test_a_profile_has_these_bytes() -> None:
    """They are JSON that any program can write; 4 and 4.0 are one number."""
    plain = Profile(Unscaled())
    assert canonical(plain) == b'{"scaling":{"rope_type":"default"}}'
    found = json.loads(canonical(Profile(YARN, logn_len=8, positions=ReRope(512))))
    assert found["logn_len"] == "0x1.0000000000000p+3"
    assert found["positions"] == {"method": "rerope", "window": "0x1.0000000000000p+9"}
    assert found["scaling"]["factor"] == "0x1.0000000000000p+2"
    assert found["scaling"]["rope_type"] == "yarn"
    as_integer = Yarn(factor=4, original_max_position_embeddings=2048)
    assert canonical(Profile(as_integer)) == canonical(Profile(YARN))


def test_keys_have_these_values() -> None:
    """If one differs, then every page on every disk is lost: that needs a reason."""
    plain = root_key(Profile(Unscaled()), "")
    assert plain.hex() == "c0fade324e3668e4f839af5c5e94bb6e134acb185bd6b1956646c022923c6a28"
    assert (
        root_key(Profile(Unscaled()), "salt").hex()
        == "7d2f74ca34284404d9a72699da7c013a37c08d531ba811c093795a64ae1e4d06"
    )
    assert (
        root_key(Profile(YARN), "").hex()
        == "7e7551f1ead074e51ca44e119a9e30f783a6ffa13eeea455426820221d86ed3b"
    )
    assert (
        root_key(Profile(YARN, positions=ReRope(512)), "").hex()
        == "3594e36fa89ba65c0b85dc1589d01da54bdb6a47efdb0c8e89e97c015c59c177"
    )
    long = LongRope(
        factor=32.0,
        short_factor=(1.0, 1.5),
        long_factor=(2.0, 64.0),
        original_max_position_embeddings=4096,
        num_tokens=8192,
    )
    assert (
        root_key(Profile(long), "").hex()
        == "89e0d95ca214bf51ecfc2d91c70eadf2fe6c9fa31aca5c8d976c0d0a899e6fbc"
    )
    assert (
        next_key(plain, [1, 2, 3]).hex()
        == "47fe641d16005460a2cdd0311247e54ddc3bc79acffaaa6893131a6abe6730a1"
    )


def test_an_identity_has_this_value() -> None:
    """The order of its facts does not matter."""
    facts = {"dtype": "float32", "page_size": 64, "layers": [[0, 3, 64, 64]]}
    expected = "6b136c2cf4a92341e66270a59009300b0211c6ed344690fa4dd7448c9c5efbac"
    assert identity_of(facts).hex() == expected
    assert identity_of(dict(reversed(facts.items()))).hex() == expected


def test_the_content_of_weights_is_their_bytes_and_not_their_place(tmp_path: Path) -> None:
    """Two folders of equal files are one model; a tokenizer is no part of it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"123")
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    content = noted(tmp_path / "a").content()
    assert noted(tmp_path / "b").content() == content
    (tmp_path / "b" / "config.json").write_text("{ }")
    assert noted(tmp_path / "b").content() != content


def test_a_file_is_hashed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    """What was kept is used by its times, and a change since the load is an error."""
    model, known = tmp_path / "m.gguf", tmp_path / "known"
    known.mkdir()
    model.write_bytes(b"123")
    content = noted(model).content(known)
    kept = known / "weights.json"
    kept.write_text(kept.read_text().replace(json.loads(kept.read_text()).popitem()[1], "0" * 64))
    assert noted(model).content(known) != content  # it was not read again
    kept.write_text("[" * 50_000)
    assert noted(model).content(known) == content
    loaded = noted(model)
    model.write_bytes(b"124")
    with pytest.raises(ChangedError, match=r"m.gguf has changed since it was loaded"):
        loaded.content(known)
    assert noted(model).content(known) != content


def test_a_write_through_a_link_of_the_hubs_cache_changes_the_content(tmp_path: Path) -> None:
    """The name of the blob stays its old hash."""
    blob, folder = tmp_path / "blobs" / ("a" * 64), tmp_path / "snapshot"
    blob.parent.mkdir()
    folder.mkdir()
    contents = set()
    for written in (b"123", b"124"):
        blob.write_bytes(written)
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "model.safetensors").symlink_to(blob)
        contents.add(noted(folder).content(tmp_path))
    assert len(contents) == 2


def test_every_part_of_a_split_gguf_is_in_the_content_and_no_name(tmp_path: Path) -> None:
    """The parts have numbers, so a renamed model is the same one."""
    contents = []
    for name, last in (("a", b"2"), ("b", b"2"), ("c", b"3")):
        first = tmp_path / f"{name}-00001-of-00002.gguf"
        first.write_bytes(b"1")
        (tmp_path / f"{name}-00002-of-00002.gguf").write_bytes(last)
        contents.append(WeightFiles(first, parts_of(first)).content())
    assert contents[0] == contents[1] != contents[2]
    assert len(parts_of(first)) == 2


def parts_of(first: Path) -> dict[Path, str]:
    """The versions of a GGUF file's parts, whose content need not be one."""
    return {path: version_of(path.stat()) for path in file_versions_module._files_of(first)}


def test_a_file_replaced_during_the_load_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions are noted before the first byte is read."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    prepare = checkpoint.prepare_model

    def rewritten(*args: Any, **options: Any) -> checkpoint.Checkpoint:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes())
        return prepare(*args, **options)

    monkeypatch.setattr(checkpoint, "prepare_model", rewritten)
    loaded = checkpoint.load_checkpoint(folder, device="cpu")
    with pytest.raises(ChangedError, match="has changed since it was loaded"):
        WeightFiles(folder, loaded.versions).content()


def test_a_file_that_could_not_be_looked_at_leaves_no_identity(tmp_path: Path) -> None:
    """Its content may decide the numbers."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "modeling.py").symlink_to(tmp_path / "absent")
    with pytest.raises(ChangedError, match=r"modeling\.py could not be looked at"):
        noted(tmp_path).content()


@pytest.mark.parametrize("pays", [False, True])
def test_products_in_pairs_are_in_the_identity(
    llama_checkpoint: checkpoint.Checkpoint, monkeypatch: pytest.MonkeyPatch, *, pays: bool
) -> None:
    """Two equal machines may find different ways faster."""
    monkeypatch.setattr(trials, "pairs_pay", lambda: pays)
    for dtype, is_expected in ((torch.bfloat16, pays), (torch.float32, False)):
        held = replace(llama_checkpoint, dtype=dtype)
        config = EngineConfig(kv_cache_tokens=256, max_model_len=128)
        assert arithmetic_facts(held, config)["pairs"] == is_expected
