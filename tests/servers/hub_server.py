"""A small hub on 127.0.0.1 that speaks as much of the hub's HTTP as huggingface_hub uses.

Routes: `/api/models/{id}`, `/api/models/{id}/revision/{revision}`, `/api/models/{id}/tree/{commit}`
and `/{id}/resolve/{revision}/{file}` with HEAD, GET and ranges.

`python -m tests.servers.hub_server serve ...` is `ropewalk serve` with the hub of `TEST_HUB`, and a
cache in `TEST_HUB_CACHE`.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

MODULE = "tests.servers.hub_server"
MODEL = "owner/small"
_SMALL = 1000  # bytes


@dataclass
class FakeHub:
    """Repositories by id, faults to play, and the requests so far."""

    # id -> revision -> file -> content; a commit is the digest of the revision's name.
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    opens_for: str | None = None  # the token that every file of a gated repository needs
    status: int | None = None  # of every answer
    num_cuts: int = 0  # answers with a file of some size that end after a part of it
    cut_at: int = 0  # bytes
    waits_at: int | None = None  # bytes of a body after which `goes_on` is awaited
    goes_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def fetched(self) -> set[str]:
        """The files whose content was requested."""
        return {
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        }


def commit_of(revision: str) -> str:
    """The commit of a branch."""
    return hashlib.sha1(revision.encode()).hexdigest()  # noqa: S324  # as git


def blob_of(content: bytes) -> str:
    """The name of a content, used as ETag."""
    return hashlib.sha1(content).hexdigest()  # noqa: S324  # as git


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.status is not None:
            return self._send(self.hub.status, b"{}")
        if path.startswith("/api/models/"):
            return self._describe(path.removeprefix("/api/models/"))
        model_id, _, rest = path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        return self._file(model_id, revision, name)

    def _describe(self, path: str) -> None:
        model_id = "/".join(path.split("/")[:2])
        kind, _, revision = path.removeprefix(model_id)[1:].partition("/")
        if model_id not in self.hub.repos:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        files = self._files(model_id, revision or "main")
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit, content = files
        found: Any
        if kind == "tree":
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": blob_of(data)}
                for name, data in content.items()
            ]
        else:
            siblings = [
                {"rfilename": name, "size": len(data), "blobId": blob_of(data)}
                for name, data in content.items()
            ]
            found = {"id": model_id, "sha": commit, "siblings": siblings}
        return self._send(200, json.dumps(found).encode())

    def _files(self, model_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, content in self.hub.repos.get(model_id, {}).items():
            if revision in {name, commit_of(name)}:
                return commit_of(name), content
        return None

    def _file(self, model_id: str, revision: str, name: str) -> None:
        files = self._files(model_id, revision)
        if files is None or name not in files[1]:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.hub.opens_for is not None and token != self.hub.opens_for:
            status = 403 if token else 401
            return self._send(status, b"", {"X-Error-Code": "GatedRepo"})
        content = files[1][name]
        headers = {"ETag": f'"{blob_of(content)}"', "X-Repo-Commit": files[0]}
        first = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        if first:
            whole = len(content)
            headers["Content-Range"] = f"bytes {first}-{whole - 1}/{whole}"
            return self._send(206, content[int(first) :], headers)
        return self._send(200, content, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        is_file = "/resolve/" in self.path
        if is_file and self.hub.waits_at is not None and len(body) > self.hub.waits_at:
            self.wfile.write(body[: self.hub.waits_at])
            self.wfile.flush()
            self.hub.goes_on.wait(30)
            body = body[self.hub.waits_at :]
        if is_file and self.hub.num_cuts and len(body) > max(self.hub.cut_at, _SMALL):
            self.hub.num_cuts -= 1
            body, self.close_connection = body[: self.hub.cut_at], True
        self.wfile.write(body)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve the repositories until the block ends."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: str, *, offline: bool) -> None:
    """Point huggingface_hub, which reads its variables at import, at a hub and a cache."""
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", f"{cache}/token")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


if __name__ == "__main__":
    from ropewalk.__main__ import main

    hub, cache = os.environ["TEST_HUB"], os.environ["TEST_HUB_CACHE"]
    use_hub(pytest.MonkeyPatch(), hub, cache, offline=False)
    main()
