"""How do the stored bytes of a place get into a process's memory?

By pread(2) from the shard file.  Each entry is compared with its CRC32C before this process hands out any of it
for the first time.  Where the catalog promises what the file does not hold, StoreError or DamagedError is raised,
never "no such file".

Why not a map: a file that is truncated while it is mapped kills its reader (SIGBUS) at the checksum, and answers
EFAULT to writev(2) later; the page tables of a map are private memory that grows with what is read.  For entries
of 10 KB the copy costs what the page faults cost.

Limits: OPEN_SHARDS_MAX descriptors, least recently opened first out; CHECKED_CHUNKS_MAX chunks of large files are
remembered as checked, then all are forgotten, which only costs a second check.

Concurrency: sync; opened after a fork, belongs to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from accelfs.errors import DamagedError, NotFoundError, StoreError
from accelfs.format.codec import checksum
from accelfs.format.lmdbfile import HEAD_BYTES, check_head

if TYPE_CHECKING:
    from accelfs.format.catalog import Place, ShardInfo

OPEN_SHARDS_MAX = 512
CHECKED_CHUNKS_MAX = 65_536


class Shards:
    """The shards of one version, by shard number."""

    def __init__(self, info: Callable[[int], ShardInfo], path: Callable[[str], Path]) -> None:
        self._info = info
        self._path = path
        self._descriptors: dict[int, int] = {}
        self._checked_chunks: set[tuple[int, int]] = set()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def entry(self, shard: int, offset: int, length: int, crc32c: int) -> bytes:
        """All stored bytes of a place, compared with their CRC32C."""
        data = self.part(shard, offset, length)
        if checksum(data) != crc32c:
            raise DamagedError(
                f"{self._name(shard)}: the {length} bytes at {offset} are damaged (CRC32C); "
                "pack the slot again or restore the shard"
            )
        return data

    def part(self, shard: int, offset: int, length: int) -> bytes:
        """Stored bytes that need no check: they are compared by the caller, or were before."""
        descriptor = self._descriptors.get(shard)
        if descriptor is None:
            descriptor = self._open(shard)
        try:
            data = os.pread(descriptor, length, offset)
        except OSError as error:
            raise StoreError(f"{self._name(shard)}: {error.strerror}") from error
        if len(data) != length:
            raise DamagedError(f"{self._name(shard)}: ends before byte {offset + length}: the shard was truncated")
        return data

    def is_checked_chunk(self, place: Place) -> bool:
        """Was this chunk of a large file compared with its CRC32C, as `note_checked_chunk` remembers?"""
        return (place.shard, place.offset) in self._checked_chunks

    def note_checked_chunk(self, place: Place) -> None:
        if len(self._checked_chunks) >= CHECKED_CHUNKS_MAX:
            self._checked_chunks.clear()
        self._checked_chunks.add((place.shard, place.offset))

    def _open(self, number: int) -> int:
        info = self._info(number)
        path = self._path(info.hash)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(f"{path}: a shard of this version is missing from the store") from None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size != info.file_bytes:
                raise DamagedError(f"{path}: the shard has {size} bytes, {info.file_bytes} were published")
            check_head(os.pread(descriptor, HEAD_BYTES, 0), size, path)
        except BaseException:
            os.close(descriptor)
            raise
        if len(self._descriptors) >= OPEN_SHARDS_MAX:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        self._descriptors[number] = descriptor
        return descriptor

    def _name(self, number: int) -> Path:
        return self._path(self._info(number).hash)
