"""Hub ids, downloaded from a small hub on this machine into a cache of the test."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch
from safetensors.torch import save

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.hub.local_model import is_hub_id, local_model
from ropewalk.model_runtime.loading.hub.wanted import Wanted
from tests.servers.hub_server import MODEL, FakeHub, commit_of, serving, use_hub

WEIGHTS, CONFIGS = Wanted(weights=True), Wanted(weights=False)
LARGE = save({"weight": torch.zeros(300_000)})
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b'{"b": 1}',
    "generation_config.json": b'{"c": 1}',
    "chat_template.jinja": b"x",
    "model.safetensors": LARGE,
}
NOT_NEEDED = {
    "pytorch_model.bin": b"p",
    "consolidated.safetensors": b"c",
    "consolidated.00.pth": b"c",
    "small-q4.gguf": b"g",
    "onnx/model.onnx": b"o",
    "onnx/config.json": b"{}",
    "README.md": b"r",
    "modeling_small.py": b"import os",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with one model, and an empty cache."""
    with serving(FakeHub({MODEL: {"main": {**FILES, **NOT_NEEDED}}})) as found:
        use_hub(monkeypatch, found.url, str(tmp_path / "cache"), offline=False)
        yield found


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub repeat a request without its pause of a second."""
    hasty = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    monkeypatch.setattr("huggingface_hub.file_download.time", hasty)


def go_offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Set HF_HUB_OFFLINE, with a hub that could not be reached anyway."""
    use_hub(monkeypatch, "http://127.0.0.1:9", str(cache), offline=True)


def names_in(folder: Path) -> set[str]:
    """The names of a snapshot's files."""
    return {path.name for path in folder.iterdir()}


def refused(wanted: Wanted = WEIGHTS, revision: str | None = None, model: str = MODEL) -> str:
    """The sentence of a refusal."""
    with pytest.raises(ModelError) as found:
        local_model(model, wanted, revision)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_hub_id_is_told_from_a_folder(tmp_path: Path) -> None:
    """Anything that exists here is no hub id, and neither is a path."""
    assert is_hub_id("owner/name")
    assert is_hub_id("name")
    for each in (str(tmp_path), tmp_path, "./name", "~/name", "a/b/c", "/nowhere"):
        assert not is_hub_id(each)


def test_needed_files_are_downloaded_and_no_others(hub: FakeHub) -> None:
    """Weights in other formats, second copies and code stay on the hub."""
    seen: list[tuple[int, int]] = []
    found = local_model(MODEL, WEIGHTS, on_bytes=lambda *counts: seen.append(counts))
    assert found.has_weights
    assert names_in(found.folder) == set(FILES) == hub.fetched()
    assert (found.folder / "model.safetensors").read_bytes() == LARGE
    total = sum(map(len, FILES.values()))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_code_is_downloaded_if_it_is_trusted(hub: FakeHub) -> None:
    """`trust_remote_code` needs the Python files of the repository."""
    found = local_model(MODEL, Wanted(weights=True, code=True))
    assert names_in(found.folder) == {*FILES, "modeling_small.py"}
    assert hub.fetched() == names_in(found.folder)


def test_weights_stay_on_the_hub_if_only_the_config_is_wanted(hub: FakeHub) -> None:
    """`config check` reads the config and the tokenizer."""
    found = local_model(MODEL, CONFIGS)
    assert not found.has_weights
    assert "model.safetensors" not in hub.fetched()
    local_model(MODEL, WEIGHTS)
    assert local_model(MODEL, CONFIGS).has_weights


def test_the_second_start_downloads_nothing(hub: FakeHub) -> None:
    """The hub is asked for the commit only."""
    first = local_model(MODEL, WEIGHTS)
    hub.requests.clear()
    seen: list[tuple[int, int]] = []
    assert local_model(MODEL, WEIGHTS, on_bytes=lambda *counts: seen.append(counts)) == first
    assert not hub.fetched()
    assert not seen


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    """Shards may have any name; a shard that the hub lacks is named before the download."""
    files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files |= {"first.safetensors": LARGE, "other.safetensors": LARGE + b"o"}
    hub.repos[MODEL]["main"] = files
    assert "has no second.safetensors on the hub" in refused()
    assert hub.fetched() == {"model.safetensors.index.json"}
    files["second.safetensors"] = LARGE + b"s"
    found = local_model(MODEL, WEIGHTS)
    assert names_in(found.folder) == set(files) - {"other.safetensors"}


def test_a_revision_is_served_by_name_and_by_commit(hub: FakeHub) -> None:
    """Equal files of two revisions are downloaded once."""
    hub.repos[MODEL]["v2"] = {**FILES, "config.json": b'{"v": 2}'}
    local_model(MODEL, WEIGHTS)
    hub.requests.clear()
    seen: list[tuple[int, int]] = []
    found = local_model(MODEL, WEIGHTS, "v2", lambda *counts: seen.append(counts))
    assert found.folder.name == commit_of("v2")
    assert (found.folder / "config.json").read_bytes() == b'{"v": 2}'
    assert seen[-1] == (8, 8)
    assert hub.fetched() == {"config.json"}
    assert local_model(MODEL, WEIGHTS, commit_of("v2")) == found


def test_a_repository_that_does_not_exist_is_a_sentence(hub: FakeHub) -> None:
    """The sentence says that it is no folder either."""
    sentence = refused(model="owner/smal")
    assert "there is no folder owner/smal, and the hub at http://127.0.0.1" in sentence
    assert "check the spelling, or set HF_TOKEN if it is private" in sentence
    assert "a hub id is `name` or `owner/name`" in refused(model="owner/sm all")


def test_a_revision_that_does_not_exist_is_a_sentence(hub: FakeHub) -> None:
    """The sentence names what a revision can be."""
    sentence = refused(revision="v3")
    assert "revision v3 of owner/small does not exist on the hub: give a branch" in sentence


def test_a_gated_repository_needs_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_TOKEN is sent; the sentence says whether there was one."""
    hub.opens_for = "right"
    sentence = refused()
    assert "owner/small is gated on the hub, and there is no token: accept its terms" in sentence
    assert "HF_TOKEN" in sentence
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "the token in use has no access" in refused()
    monkeypatch.setenv("HF_TOKEN", "right")
    assert local_model(MODEL, WEIGHTS).has_weights


def test_a_refused_token_is_a_sentence(hub: FakeHub) -> None:
    """The hub answers 403 without an error code of its own."""
    hub.status = 403
    assert "refuses access to owner/small with status 403: set HF_TOKEN" in refused()


def test_a_repository_without_safetensors_is_refused_before_the_download(hub: FakeHub) -> None:
    """The sentence names the other formats; config and tokenizer are needed as well."""
    files = hub.repos[MODEL]["main"]
    del files["model.safetensors"], files["consolidated.safetensors"]
    assert "has GGUF files and no safetensors: download one of them" in refused()
    for name in [name for name in files if name.endswith(".gguf")]:
        del files[name]
    assert "no weights in safetensors on the hub (only consolidated.00.pth," in refused()
    del files["tokenizer.json"]
    assert "has no tokenizer.json on the hub" in refused()
    assert not hub.fetched()


def test_a_full_disk_is_found_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sentence has the needed and the free bytes, the path and the variable."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    sentence = refused()
    assert "owner/small needs 1.14 MiB of disk, and 977 KiB are free" in sentence
    assert str(tmp_path / "cache") in sentence
    assert "HF_HOME" in sentence
    assert not hub.fetched()


def test_a_cache_that_cannot_be_written_is_a_sentence(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a file in the place of a folder nor a folder of another user can be a cache."""
    (tmp_path / "file").write_text("")
    use_hub(monkeypatch, hub.url, str(tmp_path / "file" / "cache"), offline=False)
    assert f"cannot use the hub's cache {tmp_path / 'file' / 'cache'} (Not a directory" in refused()
    use_hub(monkeypatch, hub.url, str(tmp_path / "cache"), offline=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "(Permission denied" in refused()
    assert not hub.fetched()


@pytest.mark.usefixtures("_hasty")
def test_a_lost_connection_is_resumed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the file is requested, and the file is whole."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.num_cuts, hub.cut_at = 1, 500_000
    found = local_model(MODEL, WEIGHTS)
    assert (found.folder / "model.safetensors").read_bytes() == LARGE
    assert [each[2] for each in hub.requests if each[2]] == ["bytes=500000-"]


@pytest.mark.usefixtures("_hasty")
def test_a_download_that_breaks_off_is_not_served(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sentence says so; offline the snapshot is refused; the next start fetches the rest."""
    hub.num_cuts, hub.cut_at = 1_000, 0
    sentence = refused()
    assert "the download of owner/small from http://127.0.0.1" in sentence
    assert "broke off" in sentence
    with monkeypatch.context() as patch:
        go_offline(patch, tmp_path / "cache")
        assert "the hub's cache has owner/small without model.safetensors" in refused()
        assert not local_model(MODEL, CONFIGS).has_weights
    hub.num_cuts = 0
    found = local_model(MODEL, WEIGHTS)
    assert (found.folder / "model.safetensors").read_bytes() == LARGE
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_offline_serves_the_cache(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """HF_HUB_OFFLINE needs no hub; a model or a revision that is not cached is a sentence."""
    found = local_model(MODEL, WEIGHTS)
    hub.requests.clear()
    go_offline(monkeypatch, tmp_path / "cache")
    assert local_model(MODEL, WEIGHTS) == local_model(MODEL, CONFIGS) == found
    assert "has no revision v2 of such a model: unset HF_HUB_OFFLINE" in refused(revision="v2")
    assert "there is no folder owner/other" in refused(model="owner/other")
    assert "a hub id is" in refused(model="owner/sm all")
    assert not hub.requests


def test_a_cache_that_another_program_filled_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Older libraries record no list of files. A snapshot without a shard is refused."""
    folder = tmp_path / "models--owner--small"
    snapshot = folder / "snapshots" / commit_of("main")
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit_of("main"))
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    for name in ("config.json", "tokenizer.json", "first.safetensors"):
        (snapshot / name).write_bytes(b"{}")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    go_offline(monkeypatch, tmp_path)
    assert "without a part of its weights" in refused()
    (snapshot / "second.safetensors").write_bytes(b"{}")
    assert local_model(MODEL, WEIGHTS).folder == snapshot


def test_no_network_is_a_sentence_unless_the_cache_has_the_model(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that starts again while the hub is down serves what it has."""
    found = local_model(MODEL, WEIGHTS)
    use_hub(monkeypatch, "http://127.0.0.1:9", str(tmp_path / "cache"), offline=False)
    assert local_model(MODEL, WEIGHTS) == found
    sentence = refused(model="owner/other")
    assert "cannot reach the hub at http://127.0.0.1:9 for owner/other" in sentence
    assert "check the network" in sentence
    use_hub(monkeypatch, hub.url, str(tmp_path / "cache"), offline=False)
    for status in (502, 429):
        hub.status = status
        assert local_model(MODEL, WEIGHTS) == found
        assert f"answered {status} for owner/other: try again later" in refused(model="owner/other")


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    """A folder has no revisions."""
    assert "revision main needs a model by hub id" in refused(revision="main", model=str(tmp_path))
    assert "there is no folder ./nothing" in refused(model="./nothing")


def test_progress_is_lines_of_the_log(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the download there are its bytes, the cache and the free bytes; then the progress."""
    monkeypatch.setattr("ropewalk.model_runtime.loading.hub.download_progress._INTERVAL_S", 0.0)
    with structlog.testing.capture_logs() as lines:
        local_model(MODEL, WEIGHTS)
    begin, *rest = [line for line in lines if line["event"].startswith("download")]
    assert {"bytes_total", "cache", "bytes_free"} <= set(begin)
    assert any(line["event"] == "download_progress" and line["percent"] == 100 for line in rest)
    assert "\r" not in capsys.readouterr().err
