"""Pages in Valkey, or in another server of its protocol.

A value is the file of a page, byte for byte. Its key is `ropewalk:v1:<identity>:<key>` in hex, as a
file's path has them. The server's `maxmemory` and its policy say how many pages there are and which
go, so there is no janitor.

The package `valkey` is imported here only.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from valkey import Valkey
from valkey.exceptions import ResponseError

from ropewalk.model_runtime.engine.kv_disk.files.janitor import PAGES
from ropewalk.model_runtime.engine.kv_disk.files.page_file import (
    BadPageError,
    PageFormat,
    page_content,
    take_page,
)
from ropewalk.model_runtime.engine.kv_disk.page_store import Look, StoreError
from ropewalk.model_runtime.engine.kv_disk.stores.store_url import StoreUrl

_CONNECT_S = 2.0
_ANSWER_S = 5.0  # until the next bytes; a request is given up long before
_OTHER_TYPE = "WRONGTYPE"
_NAME = f"ropewalk:{PAGES}:name"  # of the store itself
_NAME_BYTES = 16
_TELLING = 4  # characters of a password in a row that no message may hold


class ValkeyStore:
    """The pages of one cache in a store that servers share."""

    def __init__(self, url: StoreUrl, form: PageFormat) -> None:
        """Prepare; the first command connects."""
        self.form = form
        self._password = url.password
        self._own_name = secrets.token_bytes(_NAME_BYTES)
        self._prefix = f"ropewalk:{PAGES}:{form.name}:"
        tls: dict[str, Any] = {}
        if url.is_tls:
            ca_file = None if url.ca_file is None else str(url.ca_file)
            tls = {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": ca_file}
        self._client = Valkey(
            host=url.host,
            port=url.port,
            db=url.database,
            username=url.user,
            password=url.password,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            **tls,
        )

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page; return False if there is none. Raises BadPageError.

        One byte more than a page has is asked for. So a foreign value is found, whatever its size.
        """
        name, most = self._name(key), self.form.file_bytes
        try:
            content = self._asked(lambda: self._client.getrange(name, 0, most))
        except _OtherTypeError as error:
            raise BadPageError("foreign") from error
        except StoreError as error:
            raise BadPageError("unreachable") from error
        if not content:
            return False
        if not isinstance(content, bytes):
            raise BadPageError("foreign")
        take_page(memoryview(content), self.form, key, into)
        return True

    def put(self, key: bytes, page: memoryview, depth: int) -> bool:  # noqa: ARG002  # a store's own order
        """Write a page, unless a value of its size is there. Raises StoreError."""
        name = self._name(key)
        with suppress(_OtherTypeError):
            if self._asked(lambda: self._client.strlen(name)) == self.form.file_bytes:
                return False
        content = page_content(self.form, key, page)
        self._asked(lambda: self._client.set(name, content))
        return True

    def evict(self, keys: Sequence[bytes]) -> None:
        """Delete the values of these keys. Raises StoreError."""
        names = [self._name(key) for key in keys]
        if names:
            self._asked(lambda: self._client.unlink(*names))

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Let the store know that pages are in use. Raises StoreError."""
        names = [self._name(key) for key, _ in pages]
        if names:
            self._asked(lambda: self._client.touch(*names))

    def look(self) -> Look:
        """Return the memory that the store uses, for whomever. Raises StoreError."""
        num_bytes = self._asked(self._used_bytes)
        # The store may have deleted its name, so those who know it set it again.
        self._asked(lambda: self._client.set(_NAME, self._own_name, nx=True))
        found: Any = self._asked(lambda: self._client.getrange(_NAME, 0, _NAME_BYTES))
        if isinstance(found, bytes) and len(found) == _NAME_BYTES:
            self._own_name = found
        return Look(num_bytes, self._own_name.hex())

    def _used_bytes(self) -> int:
        memory: Any = self._client.info("memory")
        return int(memory["used_memory"])

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _asked(self, command: Callable[[], Any]) -> Any:
        """Return the answer of a command. Raises StoreError, whatever is wrong with it."""
        try:
            return command()
        except ResponseError as error:
            kind = _OtherTypeError if str(error).startswith(_OTHER_TYPE) else StoreError
            raise kind(self._told(error)) from None  # a traceback would show the whole message
        except Exception as error:  # noqa: BLE001  # another protocol raises anything in a parser
            raise StoreError(self._told(error)) from None

    def _told(self, error: Exception) -> str:
        """Return an error in one line, without its text if that holds a part of the password.

        A server may answer AUTH with the arguments of it, cut off or with escapes.
        """
        kind, text = type(error).__name__, " ".join(str(error).split())
        secret = self._password or ""
        parts = {secret[at : at + _TELLING] for at in range(max(1, len(secret) - _TELLING + 1))}
        if secret and any(each in text for each in parts):
            return f"{kind}, whose text contains a part of the password"
        return f"{kind}: {text}" if isinstance(error, LookupError | TypeError) else text or kind


class _OtherTypeError(StoreError):
    """A value that is no string of bytes has the key of a page."""
