"""What is a shard, byte by byte?

A shard is one LMDB file (see lmdbfile) of 64-256 MB that holds the stored bytes of many entries.
Nothing in it names files, nodes or versions, so versions share shards.  It is named by the SHA-256 of
the whole file.

Main database, format version 1:

    key  ordinal            u64, big-endian: 0, 1, 2 …
    value                   segment: header, then payload

    segment header (32 bytes)           "<8sIIQQ"
      0  magic              8s          b"accelSEG"
      8  format version     u32         1
     12  entries            u32         how many entries the payload holds
     16  ordinal            u64         equal to the key
     24  payload bytes      u64
    payload                 stored entries back to back, each at a multiple of 8 bytes, the gaps zero

    key  b"accelfs.shard"   the last key
    value (40 bytes)                    "<8sIIQQQ"
      0  magic              8s          b"accelSHD"
      8  format version     u32         1
     12  page bytes         u32         4096
     16  segments           u64
     24  entry bytes        u64         sum of the stored lengths
     32  entries            u64         sum over the segments

A segment holds up to one chunk (1 MiB) of entries; one entry never spans two.  A segment is never
shorter than a page, so LMDB always keeps it in overflow pages of its own, where it is contiguous in the
file.  A place is therefore a byte offset *in the file*: readers map and slice, and a range request to
the store brings one entry.  `ShardWriter.finish` finds the offsets by walking the page headers and checks
each against what LMDB returns for the key; `check` does the same for `verify`.

Concurrency: sync; one writer belongs to one thread.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accelfs.errors import DamagedError, UnknownVersionError
from accelfs.format import lmdbfile
from accelfs.format.codec import CHUNK_BYTES, file_hash
from accelfs.format.lmdbfile import PAGE_BYTES, PAGE_HEADER

if TYPE_CHECKING:
    import lmdb

FORMAT_VERSION = 1
ALIGN_BYTES = 8
SHARD_BYTES_TARGET = 128 << 20
"""A writer closes a shard once it holds this much; a store's objects are 64-256 MB."""

_SEGMENT = struct.Struct("<8sIIQQ")
_SEGMENT_MAGIC = b"accelSEG"
_TRAILER = struct.Struct("<8sIIQQQ")
_TRAILER_MAGIC = b"accelSHD"
_TRAILER_KEY = b"accelfs.shard"
_ORDINAL = struct.Struct(">Q")
_TAIL_BYTES = 64

# One chunk and the headers fill whole pages: 257 pages for 1 MiB, 0.4 %.
PAYLOAD_BYTES_MAX = CHUNK_BYTES + PAGE_BYTES - PAGE_HEADER.size - _SEGMENT.size
# LMDB keeps values below half a page inside the tree page; ours must stand in pages of their own.
_PAYLOAD_BYTES_MIN = PAGE_BYTES - PAGE_HEADER.size - _SEGMENT.size
_MAP_BYTES = 2 * SHARD_BYTES_TARGET + (64 << 20)


class Segment(NamedTuple):
    """Where a segment's payload lies in the shard file."""

    ordinal: int
    entries: int
    offset: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A closed shard file: its name (SHA-256, hex), sizes, and where each segment's payload begins."""

    path: Path
    hash: str
    file_bytes: int
    entry_bytes: int
    payload_offsets: list[int]


class ShardWriter:
    """Append stored entries to a new shard file; `finish` says at which offset each segment lies.

    An entry is written in two steps, so that a file is read straight into the segment: `reserve` gives room,
    `commit` keeps the first bytes of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._env: lmdb.Environment | None = None
        self._txn: lmdb.Transaction | None = None
        self._segment = memoryview(bytearray(_SEGMENT.size + PAYLOAD_BYTES_MAX))
        self._end = _SEGMENT.size
        self._entries = self._entries_total = 0
        self._ordinal = 0
        self._uncommitted_bytes = 0
        self.entry_bytes = 0

    def reserve(self, length: int) -> memoryview:
        """Writable room for an entry of up to `length` bytes, at most PAYLOAD_BYTES_MAX; void after the next call."""
        if self._end + length > len(self._segment):
            self._flush_segment()
        return self._segment[self._end : self._end + length]

    def commit(self, length: int) -> tuple[int, int]:
        """Keep `length` bytes of the reserved room as one entry; return (segment ordinal, offset in its payload)."""
        delta = self._end - _SEGMENT.size
        end = self._end + length
        self._end = end + -length % ALIGN_BYTES
        if self._end > len(self._segment):
            self._end = end  # the last entry of a full segment needs no gap behind it
        self._segment[end : self._end] = bytes(self._end - end)
        self._entries += 1
        self.entry_bytes += length
        return self._ordinal, delta

    def add(self, stored: bytes) -> tuple[int, int]:
        """Append an entry that is in memory; return (segment ordinal, offset in its payload)."""
        self.reserve(len(stored))[:] = stored
        return self.commit(len(stored))

    def finish(self) -> FinishedShard:
        """Write what is left, find every segment's offset and check it.

        The file is whole but not durable yet: its owner fsyncs it before it becomes visible.
        """
        if self._entries:
            self._flush_segment()
        with lmdbfile.translated(self._path):
            txn = self._transaction()
            trailer = _TRAILER.pack(
                _TRAILER_MAGIC, FORMAT_VERSION, PAGE_BYTES, self._ordinal, self.entry_bytes, self._entries_total
            )
            txn.put(_TRAILER_KEY, trailer, append=True)
            txn.commit()
            self._txn = None
            self.close()
        lmdbfile.start_writeback(self._path)
        segments = check(self._path, whole=False)
        offsets = [segment.offset for segment in segments]
        return FinishedShard(self._path, file_hash(self._path), self._path.stat().st_size, self.entry_bytes, offsets)

    def close(self) -> None:
        """Let go of the file, finished or not."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None
        if self._env is not None:
            self._env.close()
            self._env = None

    def _transaction(self) -> lmdb.Transaction:
        if self._env is None:
            self._env = lmdbfile.create(self._path, _MAP_BYTES, 0)
        if self._txn is None:
            self._txn = self._env.begin(write=True)
        return self._txn

    def _flush_segment(self) -> None:
        shortest = _SEGMENT.size + _PAYLOAD_BYTES_MIN
        if self._end < shortest:
            self._segment[self._end : shortest] = bytes(shortest - self._end)
            self._end = shortest
        payload_bytes = self._end - _SEGMENT.size
        _SEGMENT.pack_into(
            self._segment, 0, _SEGMENT_MAGIC, FORMAT_VERSION, self._entries, self._ordinal, payload_bytes
        )
        with lmdbfile.translated(self._path):
            txn = self._transaction()
            txn.put(_ORDINAL.pack(self._ordinal), self._segment[: self._end], append=True)
            self._uncommitted_bytes += payload_bytes
            if self._uncommitted_bytes >= lmdbfile.COMMIT_BYTES:
                txn.commit()
                self._txn = None
                self._uncommitted_bytes = 0
                lmdbfile.start_writeback(self._path)
        self._ordinal += 1
        self._entries_total += self._entries
        self._end = _SEGMENT.size
        self._entries = 0


def check(path: Path, *, whole: bool = True) -> list[Segment]:
    """Return the segments in order, found in the file's pages and checked against LMDB's own answers.

    `whole` compares every byte of both ways, else the two ends of each segment, which tells where it lies.
    Raises DamagedError where they disagree and UnknownVersionError for another format version.
    """
    with (
        lmdbfile.open_immutable(path, 0) as env,
        lmdbfile.translated(path),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        lmdbfile.check_pages(view, path)
        segments = list(_scan(view, path))
        with env.begin(buffers=True) as txn:
            _check_trailer(txn, segments, path)
            for segment in segments:
                start, end = segment.offset - _SEGMENT.size, segment.offset + segment.payload_bytes
                value = txn.get(_ORDINAL.pack(segment.ordinal))
                if value is None or not _same(value, view[start:end], whole):
                    raise DamagedError(f"{path}: segment {segment.ordinal} is not where its pages say")
    return segments


def _same(value: memoryview, found: memoryview, whole: bool) -> bool:
    if whole or len(value) != len(found):
        return value == found
    return value[: _SEGMENT.size] == found[: _SEGMENT.size] and value[-_TAIL_BYTES:] == found[-_TAIL_BYTES:]


def _check_trailer(txn: lmdb.Transaction, segments: list[Segment], path: Path) -> None:
    trailer = txn.get(_TRAILER_KEY)
    if trailer is None or len(trailer) != _TRAILER.size:
        raise DamagedError(f"{path}: the shard was not finished")
    magic, version, page_bytes, count, entry_bytes, entries = _TRAILER.unpack(trailer)
    if magic != _TRAILER_MAGIC:
        raise DamagedError(f"{path}: not a shard")
    if version != FORMAT_VERSION or page_bytes != PAGE_BYTES:
        raise UnknownVersionError(
            f"{path}: shard format {version} with pages of {page_bytes} bytes; this release reads format "
            f"{FORMAT_VERSION} with pages of {PAGE_BYTES}"
        )
    if count != len(segments) or txn.stat()["entries"] != count + 1:
        raise DamagedError(f"{path}: {len(segments)} segments in the file, {count} promised")
    if entries != sum(segment.entries for segment in segments):
        raise DamagedError(f"{path}: the segments do not hold the {entries} entries that were promised")
    if entry_bytes > sum(segment.payload_bytes for segment in segments):
        raise DamagedError(f"{path}: the segments do not hold the {entry_bytes} bytes that were promised")


def _scan(view: memoryview, path: Path) -> Iterator[Segment]:
    """Walk the page headers: an overflow page begins a segment and tells how many pages it takes."""
    ordinal = 0
    page = 2
    pages = len(view) // PAGE_BYTES
    while page < pages:
        start = page * PAGE_BYTES
        _, _, flags, overflow_pages = PAGE_HEADER.unpack_from(view, start)
        if flags != lmdbfile.P_OVERFLOW:
            page += 1
            continue
        magic, version, entries, number, payload_bytes = _SEGMENT.unpack_from(view, start + PAGE_HEADER.size)
        if magic != _SEGMENT_MAGIC or number != ordinal:
            raise DamagedError(f"{path}: page {page} does not begin segment {ordinal}")
        if version != FORMAT_VERSION:
            raise UnknownVersionError(f"{path}: segment format {version}; this release reads {FORMAT_VERSION}")
        offset = start + PAGE_HEADER.size + _SEGMENT.size
        if (
            overflow_pages < 1
            or offset + payload_bytes > start + overflow_pages * PAGE_BYTES
            or page + overflow_pages > pages
        ):
            raise DamagedError(f"{path}: segment {ordinal} leaves its pages")
        yield Segment(ordinal, entries, offset, payload_bytes)
        ordinal += 1
        page += overflow_pages
