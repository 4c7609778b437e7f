"""A real store on the network: the same bits and the same promises as with a folder."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from valkey import Valkey

from ropewalk.model_runtime.engine.kv_disk import identity, reader
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderStore
from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat
from ropewalk.model_runtime.engine.kv_disk.stores.store_url import parse_store_url
from ropewalk.model_runtime.engine.kv_disk.stores.valkey_store import ValkeyStore
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.scheduling.sequence import Sequence
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.waiting import wait_until
from tests.model_runtime.engine.kv_disk.disk_engines import (
    NUM_PAGES,
    PROMPT,
    Server,
    with_weights,
    written,
)
from tests.servers.programs import free_port
from tests.servers.valkey_server import RunningStore, running_store

PASSWORD = "Secret-of-9-stores"  # noqa: S105  # of a store that this test starts


@pytest.fixture
def checkpoint(llama_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return with_weights(llama_checkpoint, tmp_path / "model")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    with running_store(tmp_path) as found:
        yield found


@pytest.fixture
def client(store: RunningStore) -> Iterator[Any]:
    with Valkey(port=store.port) as found:
        yield found


def asked(checkpoint: Checkpoint, number: int = 0, **options: Any) -> Any:
    """A request for a prompt of twelve pages; those of other numbers share none."""
    prompt = [100 + number, *PROMPT[1:]] if number else PROMPT
    return request(deployment_of(checkpoint), prompt, **{"max_tokens": 4, "logprobs": 2, **options})


def pauses(logs: list[Any]) -> list[tuple[str, str]]:
    """What paused, and why."""
    return [(each["what"], each["reason"]) for each in logs if each["event"] == "kv_disk_paused"]


def test_key_and_value_are_those_of_the_folder(
    store: RunningStore, client: Any, tmp_path: Path
) -> None:
    """The file's bytes under `ropewalk:v1:<identity>:<key>`."""
    form = PageFormat(bytes(range(32)), 64, 3, "int4", keys_by_token=False, num_bytes=5000)
    key, page = bytes(range(100, 132)), np.arange(5000, dtype=np.uint32).astype(np.uint8)
    folder = FolderStore(tmp_path / "kv", form, 1 << 30, Counting())
    networked = ValkeyStore(parse_store_url(store.url), form)
    for each in (folder, networked):
        assert each.put(key, page.data, 0)
        assert not each.put(key, page.data, 0)
    (file,) = folder.path.glob("v1/*/*/*")
    (name,) = client.keys()
    assert name.decode() == f"ropewalk:v1:{file.parent.parent.name}:{file.name}"
    assert client.get(name) == file.read_bytes()
    into = np.zeros(5000, np.uint8)
    assert networked.get(key, into.data)
    assert np.array_equal(into, page)
    networked.touch([(key, 3)])
    found = networked.look()
    assert found.num_bytes > 5000
    assert ValkeyStore(parse_store_url(store.url), form).look().name == found.name
    client.delete("ropewalk:v1:name")  # as an eviction does
    assert networked.look().name == found.name
    networked.evict([key, bytes(32)])
    assert not networked.get(key, into.data)


def test_answers_are_equal_to_the_bit_cold_warm_and_half_deleted(
    engines: EngineFactory, checkpoint: Checkpoint, store: RunningStore, client: Any
) -> None:
    """An engine without a store gives the expected bits; other weights and salts find nothing."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    found = []
    for number in range(3):
        server = Server(engines, checkpoint, store.url)
        result, num_cached = server.ask(replace(asked(checkpoint), request_id=f"again-{number}"))
        assert result == expected
        found.append(num_cached)
        server.stop()
        assert server.disk.sum.num_tokens_read == num_cached
        if number == 1:
            client.delete(*client.keys()[::2])
    assert found[:2] == [0, NUM_PAGES * 16]
    assert found[2] < NUM_PAGES * 16
    assert checkpoint.source is not None
    server = Server(engines, checkpoint, store.url)
    salted = request(deployment_of(checkpoint), PROMPT, None, "other", max_tokens=1)
    assert server.ask(salted)[1] == 0
    server.stop()
    server = Server(engines, with_weights(checkpoint, checkpoint.source, b"wEights"), store.url)
    assert server.ask(asked(checkpoint))[1] == 0
    server.stop()


def truncated(client: Any, name: bytes) -> None:
    client.set(name, client.getrange(name, 0, 900))


def flipped(client: Any, name: bytes) -> None:
    client.setrange(name, 700, bytes([client.getrange(name, 700, 700)[0] ^ 1]))


def longer(client: Any, name: bytes) -> None:
    client.append(name, b"x" * 100_000)


def of_another_key(client: Any, name: bytes) -> None:
    # The store's own name is a value, too, and much shorter than a page.
    pages = client.scan_iter(name.rpartition(b":")[0] + b":*")
    client.set(name, client.get(next(each for each in pages if each != name)))


def of_another_type(client: Any, name: bytes) -> None:
    client.delete(name)
    client.rpush(name, "a", "b")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (truncated, "truncated"),
        (flipped, "checksum"),
        (longer, "foreign"),
        (of_another_key, "foreign"),
        (of_another_type, "foreign"),
    ],
)
def test_a_wrong_value_is_a_miss_and_replaced(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    store: RunningStore,
    *,
    fault: Callable[[Any, bytes], None],
    reason: str,
) -> None:
    """The pages before it are read, and the rest is computed and written again."""
    server = Server(engines, checkpoint, store.url)
    expected, _ = server.ask(asked(checkpoint))
    server.stop()
    fifth, client = Sequence(asked(checkpoint)).page_keys(5, 16)[4].hex(), Valkey(port=store.port)
    (name,) = client.keys(f"*:{fifth}")
    whole = client.get(name)
    fault(client, name)
    for num_cached, bad in ((4 * 16, {reason: 1}), (NUM_PAGES * 16, {})):
        server = Server(engines, checkpoint, store.url)
        assert server.ask(asked(checkpoint)) == (expected, num_cached)
        server.stop()
        assert server.disk.sum.bad_files == bad
        assert not server.disk.sum.is_paused
    assert client.get(name) == whole


def test_a_store_that_dies_pauses_and_is_used_again_when_it_is_back(
    engines: EngineFactory, checkpoint: Checkpoint, store: RunningStore
) -> None:
    """Prompts are computed meanwhile. A server may also start before its store does."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    store.kill()
    with structlog.testing.capture_logs() as logs:
        server = Server(engines, checkpoint, store.url)
        assert server.ask(asked(checkpoint))[0] == expected
        store.start()
        server.ask(asked(checkpoint, 1))
        written(server)
        assert len(pauses(logs)) == 2
        for each in (server.lower._reader, server.lower._writer):
            each.pause._until = 0.0
        server.ask(asked(checkpoint, 2))
        written(server)
        store.kill()
        server.ask(asked(checkpoint, 3))
        server.stop()
    assert all("refused" in reason for _, reason in pauses(logs)[:2])
    assert server.pages["written"] == NUM_PAGES
    assert server.disk.sum.bad_files == {"unreachable": 2}


def test_a_store_without_memory_pauses_the_writes_with_one_line(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """What is there is still read."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    with (
        running_store(tmp_path) as store,
        Valkey(port=store.port) as client,
        structlog.testing.capture_logs() as logs,
    ):
        server = Server(engines, checkpoint, store.url)
        server.ask(asked(checkpoint))
        server.stop()
        client.config_set("maxmemory", "1mb")
        server = Server(engines, checkpoint, store.url)
        assert server.ask(asked(checkpoint)) == (expected, NUM_PAGES * 16)
        server.ask(asked(checkpoint, 1))
        server.stop()
    ((what, reason),) = pauses(logs)
    assert what == "writes"
    assert "maxmemory" in reason
    assert server.pages == {"read": NUM_PAGES, "dropped": NUM_PAGES}


def test_a_store_that_hangs_delays_nobody_else_and_its_request_for_a_while(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    store: RunningStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request that waits is computed when its time is up."""
    expected = answer(engines.over(checkpoint), asked(checkpoint))[0]
    server = Server(engines, checkpoint, store.url)
    server.ask(asked(checkpoint))
    server.stop()
    server = Server(engines, checkpoint, store.url)
    with store.held():
        waiting = server.submit(asked(checkpoint))
        wait_until(lambda: any(server.lower._reader._read_now))
        short = request(deployment_of(checkpoint), [7, 8, 9], max_tokens=3)
        server.engine.generate([short])  # its prompt fills no page
        assert not waiting.outputs
        monkeypatch.setattr(reader, "_PAGE_S", 0.0)
        assert waiting.result() == (expected, 0)
        server.ask(asked(checkpoint, 1))
    server.stop()
    assert server.disk.sum.bad_files["slow"] == 1
    assert server.disk.sum.is_paused


def test_a_hash_of_weights_is_kept_beside_the_kernels(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    store: RunningStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store has no folder, and a fingerprint for the router hashes nothing again."""
    monkeypatch.setattr(identity, "kept_folder", lambda: tmp_path / "kept")
    Server(engines, checkpoint, store.url).stop()
    assert len(json.loads((tmp_path / "kept/weights.json").read_text())) == len(checkpoint.versions)


@pytest.mark.parametrize("password", [PASSWORD, "another"])
def test_a_password_opens_the_store_and_is_in_no_line(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, password: str
) -> None:
    """A wrong one is a pause."""
    with (
        running_store(tmp_path, "--requirepass", PASSWORD) as store,
        structlog.testing.capture_logs() as logs,
    ):
        url = store.url.replace("//", f"//default:{password}@")
        for _ in range(2):
            server = Server(engines, checkpoint, url)
            _, num_cached = server.ask(asked(checkpoint))
            server.stop()
    is_right = password == PASSWORD
    assert num_cached == is_right * NUM_PAGES * 16
    assert len(pauses(logs)) == (0 if is_right else 4)
    told = repr([logs, server.engine.config])
    assert PASSWORD not in told
    assert "another" not in told


@pytest.mark.parametrize(("database", "more"), [("", ()), ("/1", ("+select",))])
def test_a_user_with_the_documented_rights_suffices(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    store: RunningStore,
    client: Any,
    *,
    database: str,
    more: tuple[str, ...],
) -> None:
    """They are keys of ours and six commands, and one more for a database."""
    commands = [f"+{each}" for each in ("getrange", "strlen", "set", "unlink", "touch", "info")]
    client.acl_setuser(
        "server",
        enabled=True,
        passwords=[f"+{PASSWORD}"],
        keys=["ropewalk:*"],
        commands=[*commands, *more],
    )
    url = store.url.replace("//", f"//server:{PASSWORD}@") + database
    with structlog.testing.capture_logs() as logs:
        for num_cached in (0, NUM_PAGES * 16):
            server = Server(engines, checkpoint, url)
            assert server.ask(asked(checkpoint))[1] == num_cached
            server.stop()
    server.lower._writer.store.evict([bytes(32)])  # type: ignore[union-attr]
    server.lower._writer.store.touch([(bytes(32), 0)])  # type: ignore[union-attr]
    assert pauses(logs) == []


@pytest.mark.parametrize(
    "case",  # host, whether the authority is named, whether it is right
    [("localhost", True, True), ("localhost", False, False), ("127.0.0.1", True, False)],
)
def test_tls_checks_the_certificate_and_its_name(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, case: tuple[str, bool, bool]
) -> None:
    """The certificate is of localhost, and signed by itself."""
    host, has_ca, is_right = case
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost"]
    made += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    tls += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    url = f"valkeys://{host}:{port}"
    if has_ca:
        url += f"?ssl_ca_certs={certificate}"
    with running_store(tmp_path, *tls), structlog.testing.capture_logs() as logs:
        for _ in range(2):
            server = Server(engines, checkpoint, url)
            _, num_cached = server.ask(asked(checkpoint))
            server.stop()
    assert num_cached == is_right * NUM_PAGES * 16
    told = sorted(what for what, _ in pauses(logs))
    assert told == ([] if is_right else ["reads", "reads", "writes", "writes"])
    assert all("ertificate" in reason for _, reason in pauses(logs))
