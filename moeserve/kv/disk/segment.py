"""A segment of the disk tier: one file of pages, and one file with a record per page.

    segment-00000007.kv     header (4096 bytes) | page 0 | page 1 | ...
    segment-00000007.idx    record 0 | record 1 | ...                     (40 bytes each)

A page is written before its record, so after a crash every complete record refers to a complete page. A process
never appends to a segment of another process; it starts a new one. Opening a segment reads only its records; a page
is checked when it is read.

header   magic, length and CRC-32 of the rest, then the `Fingerprint` as JSON, readable by people
record   the page's key, the CRC-32 of key and page, the CRC-32 of the record so far
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec

from moeserve.kv.disk.fingerprint import Fingerprint

MAGIC: Final = b"MOEKV\r\n1"
HEADER_BYTES: Final = 4096
_PREFIX: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<32sII")
_NAME: Final = re.compile(r"segment-(\d{8})\.kv")


class SegmentError(ValueError):
    """The file is not a segment, or its header is damaged; the message says which."""


class IrregularFileError(SegmentError):
    """The path with a segment's name is no regular file, but a folder, link or FIFO. It is left untouched."""


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}.kv"


def segment_numbers(folder: Path) -> list[int]:
    """Returns the numbers of the segments in the folder, ascending. Raises OSError."""
    found = (_NAME.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match is not None)


def size_of(path: Path) -> int:
    """Returns the bytes of a segment's two files; a missing file counts 0."""
    size = 0
    for part in (path, path.with_suffix(".idx")):
        with suppress(FileNotFoundError):
            size += part.lstat().st_size
    return size


def page_checksum(key: bytes, page: bytes | bytearray | memoryview) -> int:
    """Returns the CRC-32 of key and page. The key is included to detect a page read from a wrong position."""
    return zlib.crc32(page, zlib.crc32(key))


def read_header(path: Path) -> Fingerprint:
    """Reads a segment's fingerprint. Raises SegmentError and OSError."""
    file = _File(path, os.O_RDONLY)
    header = os.pread(file.fileno(), HEADER_BYTES, 0)
    if len(header) < HEADER_BYTES:
        raise SegmentError(f"{path}: its header is cut off")
    magic, length, checksum = _PREFIX.unpack_from(header)
    if magic != MAGIC:
        raise SegmentError(f"{path}: no segment of this version")
    text = header[_PREFIX.size : _PREFIX.size + length]
    if len(text) != length or zlib.crc32(text) != checksum:
        raise SegmentError(f"{path}: its header is damaged")
    try:
        fingerprint = msgspec.json.decode(text, type=Fingerprint)
    except msgspec.MsgspecError as error:
        raise SegmentError(f"{path}: its header is not a segment's ({error})") from error
    if fingerprint.page_bytes < 1:
        raise SegmentError(f"{path}: its header has pages of {fingerprint.page_bytes} bytes")
    return fingerprint


def _header(fingerprint: Fingerprint) -> bytes:
    text = msgspec.json.encode(asdict(fingerprint))
    return (_PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text).ljust(HEADER_BYTES, b"\n")


# The errors of open(2) for a link, for a socket, and for a folder opened for writing.
_IRREGULAR: Final = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


class _File:
    """A file descriptor, closed with the last reference to it: another thread may still read a page of a segment
    that is being deleted."""

    def __init__(self, path: Path, flags: int) -> None:
        """Opens the file without following links and without blocking on a FIFO. Raises IrregularFileError and
        OSError."""
        try:
            self._number = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno in _IRREGULAR:
                raise IrregularFileError(f"{path}: it is not a regular file") from error
            raise
        if not stat.S_ISREG(os.fstat(self._number).st_mode):
            raise IrregularFileError(f"{path}: it is not a regular file")

    def fileno(self) -> int:
        return self._number

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            os.close(self._number)


class Segment:
    """One segment. One thread may write while others read. Its files close when the last reference goes."""

    def __init__(self, path: Path, fingerprint: Fingerprint, *, create: bool) -> None:
        """Opens the segment for reading, or creates it. Raises IrregularFileError and OSError."""
        self.path = path
        self._page_bytes = fingerprint.page_bytes
        self.checksums: dict[bytes, tuple[int, int]] = {}  # key → number of the page, its checksum
        self.num_damaged = 0  # damaged records
        self._num_records = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create else os.O_RDONLY
        self._pages = _File(path, flags)
        if not create:
            self._read_records()
            return
        self._index = _File(self.index_path, flags)
        _write_all(self._pages.fileno(), _header(fingerprint), 0)

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".idx")

    @property
    def num_bytes(self) -> int:
        """Bytes of both files on disk."""
        return size_of(self.path)

    def _read_records(self) -> None:
        pages = max(os.fstat(self._pages.fileno()).st_size - HEADER_BYTES, 0) // self._page_bytes
        try:
            index = _File(self.index_path, os.O_RDONLY)
        except FileNotFoundError:
            return
        with os.fdopen(os.dup(index.fileno()), "rb") as file:
            data = file.read(
                (pages + 1) * _RECORD.size
            )  # at most one page follows the last record: a write that was cut off
        whole = len(data) - len(data) % _RECORD.size
        for number, (key, checksum, own) in enumerate(_RECORD.iter_unpack(data[:whole])):
            start = number * _RECORD.size
            if number < pages and own == zlib.crc32(data[start : start + _RECORD.size - 4]):
                self.checksums[key] = (number, checksum)
            else:
                self.num_damaged += 1

    def append(self, key: bytes, page: memoryview) -> None:
        """Appends a page. Raises OSError; the page is then not stored, and the next one overwrites its place."""
        number = self._num_records
        checksum = page_checksum(key, page)
        record = key + struct.pack("<I", checksum)
        _write_all(self._pages.fileno(), page, HEADER_BYTES + number * self._page_bytes)
        record += struct.pack("<I", zlib.crc32(record))
        _write_all(self._index.fileno(), record, number * _RECORD.size)
        self._num_records += 1
        self.checksums[key] = (number, checksum)

    def read(self, key: bytes, page: memoryview) -> bool:
        """Reads the page of `key` into `page`. Returns False if the file ends within the page or the page's checksum
        does not match. Raises OSError, and KeyError if the segment does not have the key."""
        number, checksum = self.checksums[key]
        at, offset = 0, HEADER_BYTES + number * self._page_bytes
        while at < len(page):
            count = os.preadv(self._pages.fileno(), [page[at:]], offset + at)
            if count == 0:
                return False
            at += count
        return page_checksum(key, page) == checksum

    def forget(self, key: bytes) -> None:
        self.checksums.pop(key, None)

    def damaged_pages(self) -> Iterator[bytes]:
        """Reads all pages and yields the keys of pages whose checksum does not match. Raises OSError."""
        if not self.checksums:
            return
        page = memoryview(bytearray(self._page_bytes))
        for key in list(self.checksums):
            if not self.read(key, page):
                yield key

    def touch(self) -> None:
        """Sets the file's modification time to now: the next process reads it as the time of last use."""
        os.utime(self._pages.fileno())

    def delete(self) -> None:
        """Deletes both files, the index first: without it the pages are never read. Raises OSError."""
        self.index_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
