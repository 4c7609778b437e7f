"""One page of the cache as a file: a header of 128 bytes, then the page's own memory.

The file is named by the page's key, and is never changed. The header names what the bytes are:
version, identity, key, number format and layout. A checksum finds what a crash or a disk has
damaged. It is no protection against a writer with access to the folder, who could forge any sum
without a secret. The folder is private for that reason.

Little-endian: magic, version, size of the header, flags, identity, key, tokens of a page, layers,
number format, bytes of the page, crc32 of the page, crc32 of the header before it, zeros.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from io import BufferedReader
from typing import BinaryIO, Literal

VERSION = 1
HEADER_BYTES = 128
_MAGIC = b"RWKVPAGE"
_FIELDS = struct.Struct("<8sHHI32s32sIIIQI")
_SUM = struct.Struct("<I")
_KEYS_BY_TOKEN = 1  # flag: the numbers of one key lie together, else those of one dimension
# Cached numbers as they are, then quantised pages by their format, then codes with fixed scales. 5
# was another k8v4, 6 another int4.
NUMBER_FORMATS = {
    "float32": 1, "bfloat16": 2, "float16": 3, "int8": 4, "k8v4": 7, "int4": 8, "fixed8": 9,
}  # fmt: skip

# Why a file is not used. `unreadable`: the system did not read it, which says nothing about its
# content. `unreachable`: a store on the network gave no answer, or an error. `slow`: its deadline
# passed before it had been read.
Reason = Literal["truncated", "checksum", "foreign", "unreadable", "unreachable", "slow"]


class BadPageError(Exception):
    """A file that is not the page it should be."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What all pages of a cache have in common."""

    identity: bytes  # 32 bytes, see identity.py
    page_size: int  # tokens
    num_layers: int
    dtype: str  # a name in NUMBER_FORMATS
    keys_by_token: bool
    num_bytes: int  # of a page, without the header

    @property
    def name(self) -> str:
        """Return the identity as paths, keys of a store and the log have it."""
        return self.identity.hex()[:32]

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.num_bytes

    def header(self, key: bytes, checksum: int) -> bytes:
        """Return the header of a page's file; `checksum` is the crc32 of its bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            VERSION,
            HEADER_BYTES,
            _KEYS_BY_TOKEN if self.keys_by_token else 0,
            self.identity,
            key,
            self.page_size,
            self.num_layers,
            NUMBER_FORMATS[self.dtype],
            self.num_bytes,
            checksum,
        )
        return (fields + _SUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def write_page(file: BinaryIO, form: PageFormat, key: bytes, page: memoryview) -> None:
    """Write a page, a view of bytes, to an open, empty file. Raises OSError."""
    file.write(form.header(key, zlib.crc32(page)))
    file.write(page)


def read_page(file: BufferedReader, form: PageFormat, key: bytes, into: memoryview) -> None:
    """Read a page from an open file into a view of bytes. Raises BadPageError, or OSError.

    The content of `into` is undefined after an error.
    """
    _check_size(os.fstat(file.fileno()).st_size, form)
    header = file.read(HEADER_BYTES)
    if file.readinto(into) < form.num_bytes:  # it was cut after its size was read
        raise BadPageError("truncated")
    _check(header, form, key, into)


def page_content(form: PageFormat, key: bytes, page: memoryview) -> bytes:
    """Return what the file of a page holds."""
    return b"".join((form.header(key, zlib.crc32(page)), page))


def take_page(content: memoryview, form: PageFormat, key: bytes, into: memoryview) -> None:
    """Copy the page out of what its file holds. Raises BadPageError.

    The content of `into` is undefined after an error.
    """
    _check_size(len(content), form)
    into[:] = content[HEADER_BYTES:]
    _check(bytes(content[:HEADER_BYTES]), form, key, into)


def _check_size(num_bytes: int, form: PageFormat) -> None:
    if num_bytes != form.file_bytes:
        raise BadPageError("truncated" if num_bytes < form.file_bytes else "foreign")


def _check(header: bytes, form: PageFormat, key: bytes, page: memoryview) -> None:
    """Raise BadPageError if a page is not what its header says, or the header is another's."""
    (checksum,) = struct.unpack_from("<I", header, _FIELDS.size - 4)
    if header != form.header(key, checksum):
        raise BadPageError("foreign")
    if zlib.crc32(page) != checksum:
        raise BadPageError("checksum")
