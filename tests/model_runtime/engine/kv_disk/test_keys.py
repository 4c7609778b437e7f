"""Keys and identities outlive releases, so their bytes are pinned."""

import json
from pathlib import Path

import pytest

from ropewalk.model_runtime.engine.kv_disk.identity import ChangedError, WeightFiles, identity_of
from ropewalk.model_runtime.scheduling.prefix_cache import canonical, next_key, root_key
from ropewalk.rope import LongRope, Profile, Unscaled, Yarn
from ropewalk.rope.two_ranges import ReRope

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
    content = WeightFiles(tmp_path / "a").content()
    assert WeightFiles(tmp_path / "b").content() == content
    (tmp_path / "b" / "config.json").write_text("{ }")
    assert WeightFiles(tmp_path / "b").content() != content


def test_a_file_is_hashed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    """What was kept is used by its times, and a change since the load is an error."""
    model, known = tmp_path / "m.gguf", tmp_path / "known"
    known.mkdir()
    model.write_bytes(b"123")
    content = WeightFiles(model).content(known)
    kept = known / "weights.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_text(kept.read_text().replace(json.loads(kept.read_text()).popitem()[1], "0" * 64))
    assert WeightFiles(model).content(known) != content  # it was not read again
    kept.write_text("[" * 50_000)
    assert WeightFiles(model).content(known) == content
    loaded = WeightFiles(model)
    model.write_bytes(b"124")
    with pytest.raises(ChangedError, match=r"m.gguf has changed since it was loaded"):
        loaded.content(known)
    assert WeightFiles(model).content(known) != content


def test_a_blob_of_the_hubs_cache_is_not_read(tmp_path: Path) -> None:
    """Its name is its sha256."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    contents = []
    for name in ("a" * 64, "b" * 64):
        (blobs / name).write_bytes(b"123")
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "model.safetensors").symlink_to(blobs / name)
        contents.append(WeightFiles(folder).content())
    assert contents[0] != contents[1]
