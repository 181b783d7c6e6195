"""What does a dataset look like as files?

Nodes are the catalog's entry numbers: the root is 1, they are the same at every mount of a version, and a further
hard link has the node of its first link.  Data under a node never changes.  Names, targets and paths are bytes.

The tree knows no FUSE: `mount` turns TreeError and AccelfsError into errnos, `cli` into exit codes; any other
exception is a bug of ours.

Concurrency: sync; opened after a fork, belongs to one thread.  `close` lets go of every file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from accelfs.dataset.shards import Shards
from accelfs.errors import DamagedError, TreeError
from accelfs.format import catalog as catalog_format
from accelfs.format.catalog import EXTENTS, LINK, ROOT, Catalog, Entry, Header, Place
from accelfs.format.codec import CHUNK_BYTES, DICTIONARY_READ_BYTES_MAX, RAW, Decoder, sha256

_ZEROS = bytes(CHUNK_BYTES)
_TYPE_MASK = 0o170000
_unpack = catalog_format.ENTRY.unpack_from
_name_of = Catalog.name
_new_tuple = tuple.__new__  # what a NamedTuple's own constructor does, without its Python frame
_DIRECTORY_CACHE_MAX = 4096
# The kernel reads no less than this at once, so smaller entries are never read in pieces.
_PIECE_BYTES = 16 << 10


class Attributes(NamedTuple):
    """What lstat(2) shows of a node; `blocks` are of 512 bytes."""

    node: int
    size: int
    blocks: int
    mtime_seconds: int
    mtime_nanoseconds: int
    mode: int
    nlink: int
    uid: int
    gid: int

    @property
    def mtime_ns(self) -> int:
        return self.mtime_seconds * 1_000_000_000 + self.mtime_nanoseconds


class Child(NamedTuple):
    """One name of a directory.  `position` is its place there: listing goes on from position + 1."""

    position: int
    name: bytes
    attributes: Attributes


class Location(NamedTuple):
    """Where the bytes of a file lie, for people: one line a chunk, holes left out."""

    chunk: int
    shard: str
    place: Place


class Tree:
    """One version, opened.

    Methods raise TreeError for wrong paths and kinds, FormatError and StoreError for damage.
    """

    @classmethod
    def open(cls, catalog: Path, shard_path: Callable[[str], Path], dictionary: Callable[[str, int], bytes]) -> Tree:
        """Open the catalog.  `shard_path` finds a shard's file by hash, `dictionary` reads one by hash."""
        return cls(Catalog(catalog), shard_path, dictionary)

    def __init__(
        self, catalog: Catalog, shard_path: Callable[[str], Path], dictionary: Callable[[str, int], bytes]
    ) -> None:
        self._catalog = catalog
        # (number, fields) of the entry that was looked up last: its first read mostly comes next.
        self._last: tuple[int, tuple[Any, ...]] = (0, ())
        self._entries = catalog.header.entries
        self._read_dictionary = dictionary
        self.shards = Shards(catalog.shard, shard_path)
        self._decoder = Decoder(self._dictionary)
        # One bit a node: its single entry was checked in this process.
        self._checked = bytearray(catalog.header.entries // 8 + 1)
        self._directories: dict[int, tuple[int, int]] = {}
        # (node, chunk, bytes) of the entry that was decoded last.
        self._decoded: tuple[int, int, bytes | memoryview] = (0, 0, b"")

    def close(self) -> None:
        self.shards.close()
        self._catalog.close()

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def header(self) -> Header:
        """Totals of the version."""
        return self._catalog.header

    def attributes(self, node: int) -> Attributes:
        """Attributes of a node; ENOENT for a number that the version does not have."""
        return _attributes(node, _unpack(self._record(node)))

    def lookup(self, directory: int, name: bytes) -> Attributes | None:
        """The child called `name`, or None.  ENOTDIR if `directory` is none."""
        known = self._directories.get(directory) or self._directory(directory)
        found = self._catalog.lookup(directory, known[0], name)
        if found is None:
            return None
        number, record = found
        fields = _unpack(record)
        self._last = (number, fields)
        return _attributes(number, fields)

    def list(self, directory: int, start: int = 0) -> Iterator[Child]:
        """Yield the children from position `start` on, in the order of their names' bytes."""
        first_child, count = self._directory(directory)
        for number, record in self._catalog.children(first_child + start, count - start):
            attributes = _attributes(number, _unpack(record))
            yield _new_tuple(Child, (number - first_child, _name_of(record), attributes))

    def parent(self, directory: int) -> int:
        """The directory that holds this one; the root holds itself."""
        return self._directory_entry(directory).parent_or_crc

    def readlink(self, node: int) -> bytes:
        record = self._record(node)
        if not stat.S_ISLNK(_unpack(record)[3]):
            raise TreeError(f"node {node} is not a symbolic link", errno.EINVAL)
        return Catalog.target(record)

    def read(self, node: int, offset: int, size: int) -> bytes | memoryview:
        """At most `size` bytes from `offset`, fewer only at the end of the file."""
        # The hottest call of a mount: it takes the record apart without making an Entry or a Place of it.
        last, fields = self._last
        if last != node:
            fields = _unpack(self._record(node))
        file_bytes, _, _, mode, _, _, _, codec, flags, _, dictionary, position, extra, crc, _ = fields
        if mode & _TYPE_MASK != stat.S_IFREG:
            raise TreeError(f"node {node} is not a file", errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL)
        end = offset + size
        if end > file_bytes:
            end = file_bytes
        if offset >= end:
            return b""
        if flags & EXTENTS:
            return self._extents(node, file_bytes, offset, end)
        length = extra >> 32
        byte, bit = node >> 3, 1 << (node & 7)
        data: bytes | memoryview
        if codec != RAW or length != file_bytes:
            data = self._decode(
                node, 0, Place(position, extra & 0xFFFFFFFF, length, crc, codec, dictionary), file_bytes
            )
        elif self._checked[byte] & bit:
            return self.shards.part(extra & 0xFFFFFFFF, position + offset, end - offset)
        else:
            data = self.shards.entry(extra & 0xFFFFFFFF, position, length, crc)
            self._checked[byte] |= bit
        return data if end - offset == file_bytes else data[offset:end]

    def seek(self, node: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE of lseek(2), to the chunk; ENXIO behind the end, EINVAL for other kinds."""
        entry = self._entry(node)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE) or not entry.is_file:
            raise TreeError(f"node {node} cannot be searched for holes", errno.EINVAL)
        if not 0 <= offset < entry.size:
            raise TreeError(f"offset {offset} lies behind the end", errno.ENXIO)
        if not entry.flags & EXTENTS:
            return offset if whence == os.SEEK_DATA else entry.size
        chunk = self._catalog.next_chunk(node, offset // CHUNK_BYTES, data=whence == os.SEEK_DATA)
        found = entry.size if chunk is None else min(chunk * CHUNK_BYTES, entry.size)
        if whence == os.SEEK_DATA and found == entry.size:
            raise TreeError(f"there is no data behind offset {offset}", errno.ENXIO)
        return max(offset, found)

    def walk(self, path: bytes) -> Attributes:
        """The node at a path from the root; symbolic links are not followed, `.` and `..` are as in the kernel."""
        found = self.attributes(ROOT)
        parents = [ROOT]
        for name in path.split(b"/"):
            if not stat.S_ISDIR(found.mode):
                raise TreeError(f"{_shown(path)}: {os.strerror(errno.ENOTDIR)}", errno.ENOTDIR)
            if name in (b"", b"."):
                continue
            if name == b"..":
                found = self.attributes(parents.pop() if len(parents) > 1 else ROOT)
                continue
            child = self.lookup(found.node, name)
            if child is None:
                raise TreeError(f"{_shown(path)}: {os.strerror(errno.ENOENT)}", errno.ENOENT)
            parents.append(found.node)
            found = child
        return found

    def locations(self, node: int) -> Iterator[Location]:
        """Where the bytes of a file lie."""
        entry = self._entry(node)
        if not entry.is_file or entry.size == 0:
            return
        if not entry.flags & EXTENTS:
            yield Location(0, self._catalog.shard(entry.place.shard).hash, entry.place)
            return
        for chunk in range(self._catalog.chunk_count(entry)):
            place = self._catalog.extent(node, chunk)
            if place is not None:
                yield Location(chunk, self._catalog.shard(place.shard).hash, place)

    def content_hash(self, node: int) -> bytes:
        """XXH3-128 of a file's bytes as the packer saw them."""
        return self._entry(node).content_hash

    def _extents(self, node: int, file_bytes: int, start: int, end: int) -> bytes | memoryview:
        """Bytes start..end of a file with EXTENTS."""
        first, last = start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES
        parts = []
        for chunk in range(first, last + 1):
            base = chunk * CHUNK_BYTES
            size = min(CHUNK_BYTES, file_bytes - base)
            parts.append(self._chunk(node, chunk, size, max(start - base, 0), min(end - base, size)))
        return parts[0] if first == last else b"".join(parts)

    def _chunk(self, node: int, chunk: int, size: int, start: int, end: int) -> bytes | memoryview:
        """Bytes start..end of a chunk of `size` bytes."""
        place = self._catalog.extent(node, chunk)
        if place is None:
            return _ZEROS[: end - start]
        if place.codec == RAW and size == place.length and self.shards.is_checked_chunk(place):
            return self.shards.part(place.shard, place.offset + start, end - start)
        data = self._decode(node, chunk, place, size)
        self.shards.note_checked_chunk(place)
        return data if end - start == size else data[start:end]

    def _decode(self, node: int, chunk: int, place: Place, size: int) -> bytes | memoryview:
        """All bytes of one entry, checked and decoded; the last one is kept, since the kernel may read it in pieces."""
        if self._decoded[0] == node and self._decoded[1] == chunk:
            return self._decoded[2]
        stored = self.shards.entry(place.shard, place.offset, place.length, place.crc32c)
        data = self._decoder.decode(place.codec, place.dictionary, stored, size)
        if size > _PIECE_BYTES:
            self._decoded = (node, chunk, data)
        return data

    def _record(self, node: int) -> memoryview:
        if 0 < node <= self._entries:
            return self._catalog.record(node)
        raise TreeError(f"this version has no node {node}", errno.ENOENT)

    def _entry(self, node: int) -> Entry:
        return Entry._make(_unpack(self._record(node)))

    def _directory_entry(self, node: int) -> Entry:
        entry = self._entry(node)
        if not entry.is_directory:
            raise TreeError(f"node {node} is not a directory", errno.ENOTDIR)
        return entry

    def _directory(self, node: int) -> tuple[int, int]:
        """(number of the first child, count), remembered for a bounded number of directories."""
        found = self._directories.get(node)
        if found is None:
            entry = self._directory_entry(node)
            if len(self._directories) >= _DIRECTORY_CACHE_MAX:
                self._directories.clear()
            found = self._directories[node] = (entry.position, entry.extra)
        return found

    def _dictionary(self, number: int) -> bytes:
        digest, size = self._catalog.dictionary(number)
        if size > DICTIONARY_READ_BYTES_MAX:
            raise DamagedError(f"dictionary {number} has {size} bytes; at most {DICTIONARY_READ_BYTES_MAX} are read")
        data = self._read_dictionary(digest, size)
        if sha256(data) != digest:
            raise DamagedError(f"dictionary {digest} does not have the content that was published")
        return data


def _attributes(number: int, fields: tuple[Any, ...]) -> Attributes:
    """Of the entry with this number and these fields; a further hard link shows the node of its first."""
    size, seconds, nanoseconds, mode, uid, gid, nlink, _, flags, _, _, position, extra, _, _ = fields
    blocks = -(-size // 512)
    if flags:
        blocks = catalog_format.blocks(size, flags, extra)
        if flags & LINK:
            number = position
    return _new_tuple(Attributes, (number, size, blocks, seconds, nanoseconds, mode, nlink, uid, gid))


def _shown(path: bytes) -> str:
    return os.fsdecode(path)
