"""What did the walk of a source find, kept on disk so that memory does not grow with it?

Two files in the scratch folder: `records`, one fixed record a number (the catalog's entry as far as it is
known, and what finds and recognises the file again), and `names`, the bytes of names and link targets.
Workers fill in the place of each file in its record.  Numbers are those of the catalog: breadth first, the
children of a directory contiguous and sorted by their names' bytes.

While a pack runs, a file's `position` is (segment ordinal << 32 | offset in its payload) and the low half of
`extra` the worker's own shard number: `build` turns both into a place when all shards are closed.  For a file
with EXTENTS, `position` is an offset into the worker's extents file and `parent_or_crc` is
(worker << 32 | number of extents).

Concurrency: sync.  One writer (the walk), then one reader-writer a process, each on its own numbers.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from accelfs.format.catalog import ENTRY, Entry

_TAIL = struct.Struct("<QQIIQQ")
RECORD_BYTES = ENTRY.size + _TAIL.size
ATTRIBUTES = struct.Struct("<QqIIIII")  # the entry up to nlink: what a fresh fstat replaces
_RESULT_OFFSET = ATTRIBUTES.size
_RESULT = struct.Struct("<BBBBQQQ16s")
_WRITE_BYTES = 1 << 20


class Record(NamedTuple):
    """One name of the source."""

    entry: Entry
    parent: int
    name_offset: int
    name_bytes: int
    target_bytes: int
    inode: int
    device: int


class Result(NamedTuple):
    """The part of a file's entry that only its reading tells; see the module's docstring."""

    codec: int
    dictionary: int
    flags: int
    position: int
    extra: int
    crc: int
    content_hash: bytes


class ListingWriter:
    """Append records in number order, in memory-flat fashion."""

    def __init__(self, folder: Path) -> None:
        self._records = (folder / "records").open("wb", buffering=_WRITE_BYTES)
        self._names = (folder / "names").open("wb", buffering=_WRITE_BYTES)
        self.count = 0
        self.name_bytes = 0
        self.files = array("Q")
        """Numbers of the regular files to be read, ascending."""
        self.sizes = array("Q")
        """Their sizes, in the same order."""
        self.directories = array("Q")
        """Four numbers a directory, by ascending number: number, first child, count, subdirectories."""
        self.further_links: Counter[int] = Counter()
        """How many further names the node of this number has; only nodes that have some."""

    def add(self, entry: Entry, parent: int, name: bytes, target: bytes, inode: int, device: int) -> int:
        """Append one record and return its number."""
        self.count += 1
        self._records.write(
            ENTRY.pack(*entry) + _TAIL.pack(parent, self.name_bytes, len(name), len(target), inode, device)
        )
        self._names.write(name + target if target else name)
        self.name_bytes += len(name) + len(target)
        return self.count

    def close(self) -> None:
        self._records.close()
        self._names.close()


class Listing:
    """Read records by number and write the result of one file; opened by each process for itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = os.open(folder / "records", os.O_RDWR | os.O_CLOEXEC)
        self._names = os.open(folder / "names", os.O_RDONLY | os.O_CLOEXEC)
        self._paths: dict[int, bytes] = {}

    def close(self) -> None:
        os.close(self._records)
        os.close(self._names)

    def record(self, number: int) -> Record:
        return _record(os.pread(self._records, RECORD_BYTES, (number - 1) * RECORD_BYTES), 0)

    def name(self, record: Record) -> bytes:
        return os.pread(self._names, record.name_bytes, record.name_offset)

    def path(self, record: Record) -> bytes:
        """The path relative to the source's root; parents are remembered, a bounded number of them."""
        return self._directory_path(record.parent) + self.name(record)

    def scan(self) -> Iterator[tuple[int, Record, bytes, bytes]]:
        """Yield (number, record, name, target) of all, in order, reading ahead in large blocks."""
        number = 0
        with (self._folder / "records").open("rb") as records, (self._folder / "names").open("rb") as names:
            while block := records.read(RECORD_BYTES * 4096):
                for start in range(0, len(block), RECORD_BYTES):
                    number += 1
                    record = _record(block, start)
                    yield number, record, names.read(record.name_bytes), names.read(record.target_bytes)

    def write_result(self, number: int, record: Record, result: Result) -> None:
        """Fill in where and how a file is stored now."""
        packed = _RESULT.pack(
            result.codec, result.flags, record.name_bytes, result.dictionary, result.position, result.extra,
            result.crc, result.content_hash,
        )  # fmt: skip
        os.pwrite(self._records, packed, (number - 1) * RECORD_BYTES + _RESULT_OFFSET)

    def write_attributes(self, number: int, entry: Entry) -> None:
        """Replace the attributes of a file that changed between the walk and its reading."""
        os.pwrite(self._records, ATTRIBUTES.pack(*entry[:7]), (number - 1) * RECORD_BYTES)

    def _directory_path(self, number: int) -> bytes:
        """With a trailing slash, empty for the root."""
        if number == 1:
            return b""
        found = self._paths.get(number)
        if found is None:
            record = self.record(number)
            found = self._directory_path(record.parent) + self.name(record) + b"/"
            if len(self._paths) >= 4096:
                self._paths.clear()
            self._paths[number] = found
        return found


def _record(buffer: bytes, start: int) -> Record:
    return Record(Entry._make(ENTRY.unpack_from(buffer, start)), *_TAIL.unpack_from(buffer, start + ENTRY.size))
