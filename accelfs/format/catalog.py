"""What is a catalog, byte by byte?

A catalog is one LMDB file (see lmdbfile) that holds every name, attribute and place of one version.  It
is named by the SHA-256 of the whole file.  Entries are numbered: the root is 1 and the children of a
directory are contiguous, in the order of their names' bytes; directories follow each other breadth first.

Database `header`, format version 1:

    key  b"catalog"         value (96 bytes)    "<8sII5Q32s8x"
      0  magic              8s          b"accelCAT"
      8  format version     u32         1
     12  shard format       u32         1
     16  entries            u64         numbers run from 1 to this
     24  files              u64         names of regular files, further hard links included
     32  data bytes         u64         sum of the sizes of regular files, each node once
     40  stored bytes       u64         sum of their stored lengths
     48  data blocks        u64         sum of their 512-byte blocks, as `du` counts
     56  tree digest        32s         SHA-256 over all entries, see TreeDigest
     88  reserved           8 bytes     zero

Database `entries`:

    key  number             u64, big-endian
    value                   entry (80 bytes), name, and of a symbolic link its target

      0  size               u64         bytes; of a directory the source's st_size; of a link its target's length
      8  mtime seconds      i64
     16  mtime nanoseconds  u32
     20  mode               u32         type and permission bits as in st_mode
     24  uid                u32
     28  gid                u32
     32  nlink              u32         names in this tree; of a directory 2 + subdirectories
     36  codec              u8          see codec
     37  flags              u8          1 EXTENTS, 2 LINK
     38  name bytes         u8          0 for the root only
     39  dictionary         u8          number of the zstd dictionary, 0: none
     40  position           u64         file: offset of the stored bytes in the shard file; directory: number of
                                        its first child; LINK: number of the node it is a further name of
     48  extra              u64         file: shard (low 32 bits) and stored length (high 32 bits);
                                        EXTENTS: st_blocks, with holes the source's; directory: count of children
     56  parent or CRC      u64         file: CRC32C of the stored bytes (low 32 bits; high zero); directory: parent
     64  content hash       16s         file: XXH3-128 of its bytes; else zero

Database `names`:  (directory u64, hash u32: codec.name_hash) big-endian -> the child's index within its
    directory, u32; several where hashes collide.  A lookup checks the name in the entry.
Database `extents`:  (number u64, chunk u64) big-endian -> place (24 bytes): offset u64, shard u32, stored
    length u32, CRC32C u32, codec u8, dictionary u8, reserved u16.  A chunk that has no key is a hole.
Database `shards`:  shard number u32, big-endian -> (56 bytes): SHA-256 32s, file bytes u64, live bytes u64
    (stored bytes that this version names), reserved u64.
Database `dictionaries`:  dictionary number u8 (1 …) -> (40 bytes): SHA-256 32s, bytes u64.

A file above the chunk size or with holes has EXTENTS: one place a chunk, decoded length = what is left of
the file, at most CHUNK_BYTES.  A further hard link carries the attributes and the content hash of its node
(with EXTENTS also its blocks), LINK and the node's number, but no place.  Stored lengths are u32 because an
entry never exceeds one chunk; sizes, offsets and counts are u64.

Concurrency: sync.  A `Catalog` is opened after a fork and belongs to one thread; it holds one read
transaction for its whole life, which is safe because nobody ever writes the file again.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import lmdb

from accelfs.errors import DamagedError, UnknownVersionError
from accelfs.format import lmdbfile, shard
from accelfs.format.codec import CHUNK_BYTES, name_hash

FORMAT_VERSION = 1
ROOT = 1
NAME_BYTES_MAX = 255
EXTENTS = 1
LINK = 2

_HEADER = struct.Struct("<8sII5Q32s8x")
_HEADER_MAGIC = b"accelCAT"
_HEADER_KEY = b"catalog"
ENTRY = struct.Struct("<QqIIIIIBBBBQQQ16s")
_ENTRY_BYTES = ENTRY.size
_NAME_BYTES_OFFSET = 38
_NUMBER = struct.Struct(">Q")
_NAME_KEY = struct.Struct(">QI")
_INDEX = struct.Struct("<I")
_EXTENT_KEY = struct.Struct(">QQ")
_PLACE = struct.Struct("<QIIIBBH")
_SHARD_KEY = struct.Struct(">I")
_SHARD = struct.Struct("<32sQQ8x")
_DICTIONARY = struct.Struct("<32sQ")
_DATABASES = (b"header", b"entries", b"names", b"extents", b"shards", b"dictionaries")
_DATABASES_MAX = 8
# Below lmdbfile.COMMIT_BYTES, since dirty tree pages are all that a catalog's writer holds in memory.
_COMMIT_BYTES = 4 << 20
_TYPE_MASK = 0o170000


class Place(NamedTuple):
    """Where the stored bytes of one entry lie, and how to check and decode them."""

    offset: int
    shard: int
    length: int
    crc32c: int
    codec: int
    dictionary: int


class Entry(NamedTuple):
    """One numbered entry as it stands in the file, without name and target."""

    size: int
    mtime_seconds: int
    mtime_nanoseconds: int
    mode: int
    uid: int
    gid: int
    nlink: int
    codec: int
    flags: int
    name_bytes: int
    dictionary: int
    position: int
    extra: int
    parent_or_crc: int
    content_hash: bytes

    @property
    def place(self) -> Place:
        """The place of a file without EXTENTS."""
        return Place(
            self.position, self.extra & 0xFFFFFFFF, self.extra >> 32, self.parent_or_crc, self.codec, self.dictionary
        )

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


class ShardInfo(NamedTuple):
    """One row of the shard table."""

    hash: str
    file_bytes: int
    live_bytes: int


class _Databases(NamedTuple):
    header: lmdb._Database
    entries: lmdb._Database
    names: lmdb._Database
    extents: lmdb._Database
    shards: lmdb._Database
    dictionaries: lmdb._Database


@dataclass(frozen=True, slots=True)
class Header:
    """What the `header` database says of the whole version."""

    entries: int
    files: int
    data_bytes: int
    stored_bytes: int
    data_blocks: int
    tree_digest: str


def blocks(size: int, flags: int, extra: int) -> int:
    """512-byte blocks as st_blocks shows them: the source's for files with holes, never 0, else from the size."""
    if flags & EXTENTS:
        return max(1, extra) if size else 0
    return -(-size // 512)


class TreeDigest:
    """SHA-256 over what a user can see of a tree: equal trees have equal digests, however they are stored.

    Each entry in number order adds: name bytes u16, target bytes u32, name, target, then size u64 (0 for a
    directory, whose st_size is its file system's own affair), mtime i64 + u32, mode, uid, gid u32, node u64,
    parent u64 and the content hash.
    """

    _HEAD = struct.Struct("<HI")
    _PART = struct.Struct("<QqIIIIQQ16s")
    _BATCH_BYTES = 1 << 16

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pending = bytearray()

    def add(self, number: int, parent: int, entry: Entry, name: bytes, target: bytes) -> None:
        size, seconds, nanoseconds, mode, uid, gid, _, _, flags, _, _, position, _, _, content = entry
        if mode & _TYPE_MASK == stat.S_IFDIR:
            size = 0
        node = position if flags & LINK else number
        pending = self._pending
        pending += self._HEAD.pack(len(name), len(target))
        pending += name
        pending += target
        pending += self._PART.pack(size, seconds, nanoseconds, mode, uid, gid, node, parent, content)
        if len(pending) >= self._BATCH_BYTES:
            self._digest.update(pending)
            pending.clear()

    def hexdigest(self) -> str:
        self._digest.update(self._pending)
        self._pending.clear()
        return self._digest.hexdigest()


class CatalogWriter:
    """Write a catalog in one pass: entries by ascending number, extents and shards in any order of calls.

    `entries` and `name_bytes` are upper bounds that size the map.  Use as a context manager; only `finish`
    makes the file whole.
    """

    def __init__(self, path: Path, *, entries: int, name_bytes: int, extents: int) -> None:
        self._path = path
        # Twice the budget of 130 bytes an entry, so that the bound is never what fails.
        self._map_bytes = (64 << 20) + entries * 400 + 3 * name_bytes + extents * 200
        self._digest = TreeDigest()
        self._uncommitted_bytes = 0
        self._files = self._data_bytes = self._stored_bytes = self._data_blocks = 0
        self._entries = 0
        self._parents = _Parents()

    def __enter__(self) -> CatalogWriter:
        with lmdbfile.translated(self._path):
            self._env: lmdb.Environment = lmdbfile.create(self._path, self._map_bytes, _DATABASES_MAX)
            self._databases = _Databases._make(self._env.open_db(name) for name in _DATABASES)
            self._txn: lmdb.Transaction | None = self._env.begin(write=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._txn is not None:
            self._txn.abort()
            self._txn = None
        self._env.close()

    def add(self, number: int, entry: Entry, name: bytes, target: bytes = b"") -> None:
        """Append the next entry; `number` must be one more than the last."""
        assert number == self._entries + 1, "entries come in number order"
        parent = self._parents.of(number)
        self._put(self._databases.entries, _NUMBER.pack(number), ENTRY.pack(*entry) + name + target)
        self._entries = number
        self._digest.add(number, parent, entry, name, target)
        kind = entry.mode & _TYPE_MASK
        if kind == stat.S_IFREG:
            self._files += 1
            flags = entry.flags
            if not flags & LINK:
                self._data_bytes += entry.size
                self._data_blocks += blocks(entry.size, flags, entry.extra)
                if not flags & EXTENTS:
                    self._stored_bytes += entry.extra >> 32
        elif kind == stat.S_IFDIR:
            self._parents.expect(number, entry.position, entry.extra)

    def add_names(self, directory: int, names: list[bytes]) -> None:
        """Index the children of one directory, in child order; directories come by ascending number."""
        rows = sorted((name_hash(name), index) for index, name in enumerate(names))
        position = 0
        while position < len(rows):
            hashed, index = rows[position]
            value = _INDEX.pack(index)
            position += 1
            while position < len(rows) and rows[position][0] == hashed:
                value += _INDEX.pack(rows[position][1])
                position += 1
            self._put(self._databases.names, _NAME_KEY.pack(directory, hashed), value)

    def add_extent(self, number: int, chunk: int, place: Place) -> None:
        """Say where one chunk of a file with EXTENTS lies; ascending by (number, chunk)."""
        value = _PLACE.pack(place.offset, place.shard, place.length, place.crc32c, place.codec, place.dictionary, 0)
        self._put(self._databases.extents, _EXTENT_KEY.pack(number, chunk), value)
        self._stored_bytes += place.length

    def add_shard(self, number: int, info: ShardInfo) -> None:
        """Append one row of the shard table; ascending by number."""
        value = _SHARD.pack(bytes.fromhex(info.hash), info.file_bytes, info.live_bytes)
        self._put(self._databases.shards, _SHARD_KEY.pack(number), value)

    def add_dictionary(self, number: int, digest: str, size: int) -> None:
        """Name the object that holds one zstd dictionary; ascending by number, from 1."""
        self._put(self._databases.dictionaries, bytes((number,)), _DICTIONARY.pack(bytes.fromhex(digest), size))

    def finish(self) -> Header:
        """Write the header and make the file durable."""
        header = Header(
            self._entries, self._files, self._data_bytes, self._stored_bytes, self._data_blocks,
            self._digest.hexdigest(),
        )  # fmt: skip
        packed = _HEADER.pack(
            _HEADER_MAGIC, FORMAT_VERSION, shard.FORMAT_VERSION, header.entries, header.files, header.data_bytes,
            header.stored_bytes, header.data_blocks, bytes.fromhex(header.tree_digest),
        )  # fmt: skip
        self._put(self._databases.header, _HEADER_KEY, packed)
        with lmdbfile.translated(self._path):
            assert self._txn is not None
            self._txn.commit()
            self._txn = None
            self._env.sync(True)
        return header

    def _put(self, database: lmdb._Database, key: bytes, value: bytes) -> None:
        assert self._txn is not None
        try:
            self._txn.put(key, value, db=database, append=True)
            self._uncommitted_bytes += len(key) + len(value)
            if self._uncommitted_bytes >= _COMMIT_BYTES:
                self._txn.commit()
                self._txn = self._env.begin(write=True)
                self._uncommitted_bytes = 0
        except lmdb.Error as error:
            raise lmdbfile.translation(error, self._path) from error


class _Parents:
    """Which directory does the next number belong to?  Children follow in the order of their directories."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        self._directory = ROOT
        self._left = 0

    def of(self, number: int) -> int:
        if number == ROOT:
            return ROOT
        if self._left == 0:
            self._directory, self._left = self._ranges.pop(number)
        self._left -= 1
        return self._directory

    def expect(self, directory: int, first_child: int, count: int) -> None:
        if count:
            self._ranges[first_child] = (directory, count)


class Catalog:
    """Read one finished catalog.  Raises DamagedError for what it promises and does not hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._env = lmdbfile.open_immutable(path, _DATABASES_MAX)
        try:
            with lmdbfile.translated(path):
                # With create=False a missing database is an error, not an empty one.
                self._databases = _Databases._make(self._env.open_db(name, create=False) for name in _DATABASES)
                self._txn = self._env.begin(buffers=True)
                # One transaction a hot database, whose default it is: half of what a get costs is its arguments.
                self._get_entry = self._env.begin(db=self._databases.entries, buffers=True).get
                self._get_name = self._env.begin(db=self._databases.names, buffers=True).get
            self.header = self._read_header()
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        self._txn.abort()
        self._env.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, number: int) -> memoryview:
        """The raw value of one entry: ENTRY, name, target."""
        value = self._get_entry(number.to_bytes(8, "big"))
        if value is None:
            raise DamagedError(f"{self.path}: entry {number} is missing")
        return value

    def entry(self, number: int) -> Entry:
        return Entry._make(ENTRY.unpack_from(self.record(number)))

    @staticmethod
    def name(record: memoryview) -> bytes:
        """The name in a raw value; empty for the root."""
        return record[_ENTRY_BYTES : _ENTRY_BYTES + record[_NAME_BYTES_OFFSET]].tobytes()

    @staticmethod
    def target(record: memoryview) -> bytes:
        """The target in a symbolic link's raw value."""
        return record[_ENTRY_BYTES + record[_NAME_BYTES_OFFSET] :].tobytes()

    def lookup(self, directory: int, first_child: int, name: bytes) -> tuple[int, memoryview] | None:
        """Return (number, raw value) of the child called `name`, or None."""
        indexes = self._get_name(_NAME_KEY.pack(directory, name_hash(name)))
        if indexes is None:
            return None
        for start in range(0, len(indexes), _INDEX.size):
            number = first_child + _INDEX.unpack_from(indexes, start)[0]
            record = self._get_entry(number.to_bytes(8, "big"))
            if record is None:
                raise DamagedError(f"{self.path}: entry {number} is missing")
            if record[_ENTRY_BYTES : _ENTRY_BYTES + record[_NAME_BYTES_OFFSET]] == name:
                return number, record
        return None

    def children(self, first_child: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (number, raw value) of `count` entries from `first_child`: one range scan."""
        if count <= 0:
            return
        number = first_child
        end = first_child + count
        with self._txn.cursor(db=self._databases.entries) as cursor:
            if cursor.set_key(first_child.to_bytes(8, "big")):
                for value in cursor.iternext(keys=False, values=True):
                    yield number, value
                    number += 1
                    if number == end:
                        return
        raise DamagedError(f"{self.path}: entry {number} is missing")

    def extent(self, number: int, chunk: int) -> Place | None:
        """The place of one chunk of a file with EXTENTS; None is a hole."""
        value = self._txn.get(_EXTENT_KEY.pack(number, chunk), db=self._databases.extents)
        if value is None:
            return None
        offset, shard_number, length, crc, codec, dictionary, _ = _PLACE.unpack(value)
        return Place(offset, shard_number, length, crc, codec, dictionary)

    def next_chunk(self, number: int, chunk: int, *, data: bool) -> int | None:
        """The first chunk from `chunk` on that holds data, or that is a hole; None: no data follows."""
        with self._txn.cursor(db=self._databases.extents) as cursor:
            found = cursor.set_range(_EXTENT_KEY.pack(number, chunk))
            for key in cursor.iternext(keys=True, values=False) if found else ():
                node, at = _EXTENT_KEY.unpack(key)
                if node != number:
                    break
                if data:
                    return int(at)
                if at != chunk:
                    break
                chunk += 1
        return None if data else chunk

    def shard(self, number: int) -> ShardInfo:
        value = self._txn.get(_SHARD_KEY.pack(number), db=self._databases.shards)
        if value is None:
            raise DamagedError(f"{self.path}: shard {number} is not in the shard table")
        digest, file_bytes, live_bytes = _SHARD.unpack(value)
        return ShardInfo(digest.hex(), file_bytes, live_bytes)

    def shards(self) -> list[ShardInfo]:
        """The whole shard table, by shard number."""
        count = self._txn.stat(self._databases.shards)["entries"]
        return [self.shard(number) for number in range(count)]

    def dictionary(self, number: int) -> tuple[str, int]:
        """(SHA-256 in hex, bytes) of the object that holds a dictionary."""
        value = self._txn.get(bytes((number,)), db=self._databases.dictionaries)
        if value is None:
            raise DamagedError(f"{self.path}: dictionary {number} is not in the table")
        digest, size = _DICTIONARY.unpack(value)
        return digest.hex(), size

    def chunk_count(self, entry: Entry) -> int:
        return -(-entry.size // CHUNK_BYTES)

    def _read_header(self) -> Header:
        value = self._txn.get(_HEADER_KEY, db=self._databases.header)
        if value is None or len(value) != _HEADER.size:
            raise DamagedError(f"{self.path}: the catalog was not finished")
        magic, version, shard_version, entries, files, data_bytes, stored_bytes, data_blocks, digest = _HEADER.unpack(
            value
        )
        if magic != _HEADER_MAGIC:
            raise DamagedError(f"{self.path}: not a catalog")
        if version != FORMAT_VERSION:
            raise UnknownVersionError(f"{self.path}: catalog format {version}; this release reads {FORMAT_VERSION}")
        if shard_version != shard.FORMAT_VERSION:
            raise UnknownVersionError(
                f"{self.path}: shard format {shard_version}; this release reads {shard.FORMAT_VERSION}"
            )
        if bytes(value[-8:]) != bytes(8):
            raise DamagedError(f"{self.path}: reserved bytes are not zero")
        return Header(entries, files, data_bytes, stored_bytes, data_blocks, digest.hex())
