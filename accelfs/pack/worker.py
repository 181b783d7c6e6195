"""What does one packing process do?

It takes batches of files from a shared counter, reads each file once, hashes, compresses and appends it to a
shard of its own, and writes the result into the listing.  One process a core keeps all cores busy without a
lock: the shards of different processes never meet.  Messages to the parent are of the types in `Message`.

A file is read between two fstats.  What changed since the walk is read with its new attributes; what changes
while it is read is tried again, READ_TRIES times, and is then as unreadable as a file that vanished.

Concurrency: a forked process, single-threaded; it is killed when its parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
from array import array
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING

from accelfs.errors import AccelfsError, FullError
from accelfs.format.catalog import EXTENTS
from accelfs.format.codec import CHUNK_BYTES, RAW, Compressor, ContentHash, checksum, content_hash
from accelfs.format.shard import SHARD_BYTES_TARGET, ShardWriter
from accelfs.pack.listing import Listing, Record, Result
from accelfs.pack.profile import LEVEL, Plan, is_compressed
from accelfs.pack.source import Opener, file_entry, kept_out

if TYPE_CHECKING:
    from accelfs.pack.report import Kind

READ_TRIES = 3
SHARDS_MAX = 1 << 20
"""Shard numbers of one process: worker * SHARDS_MAX + its own count."""
EXTENT = struct.Struct("<QQIIIBB2x")
"""One line of a worker's extents file: chunk, position, shard, stored length, CRC32C, codec, dictionary."""
# A large file is first tried on this much from its middle, so that a film is not compressed in vain.
_PROBE_BYTES = 64 << 10
_REPORT_FILES = 256
# Errors of open and read that do not speak of the file.
_OUR_TROUBLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


@dataclass(frozen=True, slots=True)
class Task:
    """What every worker of one pack knows."""

    root: Path
    scratch: Path
    plan: Plan
    files: array[int]
    order: array[int] | range
    batches: array[int]
    """Batch k covers the files order[batches[k]:batches[k + 1]]."""
    parent_pid: int


@dataclass(frozen=True, slots=True)
class BatchDone:
    files: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class ShardDone:
    number: int
    path: Path
    hash: str
    file_bytes: int
    payload_offsets: array[int]


@dataclass(frozen=True, slots=True)
class Unreadable:
    number: int
    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    kept_out: Counter[Kind] = field(default_factory=Counter)
    """How many files have xattrs, acls, capabilities: what a version does not keep."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


Message = BatchDone | ShardDone | Unreadable | Finished | Failed


class ChangedError(Exception):
    """The file was written while it was read, READ_TRIES times."""


def run(worker: int, task: Task, counter: Synchronized[int], parent: Connection) -> None:
    """The process's main function."""
    # Ctrl-C reaches the whole foreground group; the parent decides what it means, and blocked it until now.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != task.parent_pid:
        return  # it died before it could be asked for
    _keep_memory(libc)
    try:
        packer = _Packer(worker, task, parent)
        try:
            packer.pack(counter)
        finally:
            packer.close()
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone; the next pack of the slot clears the scratch folder
    except AccelfsError as error:
        parent.send(Failed(error))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        parent.send(Failed(FullError(f"{task.scratch}: no space left on the device") if full else error))
    except Exception as error:
        parent.send(Failed(error))


class _Packer:
    def __init__(self, worker: int, task: Task, parent: Connection) -> None:
        self._worker = worker
        self._task = task
        self._parent = parent
        self._listing = Listing(task.scratch)
        self._root = os.open(task.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._opener = Opener(self._root)
        self._compressor = Compressor(LEVEL, task.plan.dictionary) if task.plan.compression == "zstd" else None
        self._dictionary = 1 if task.plan.dictionary else 0
        self._extents = (task.scratch / f"extents-{worker}").open("wb")
        self._shard: ShardWriter | None = None
        self._shard_count = 0
        self._kept_out: Counter[Kind] = Counter()

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._extents.close()
        self._listing.close()
        self._opener.close()
        os.close(self._root)

    def pack(self, counter: Synchronized[int]) -> None:
        batches = self._task.batches
        while True:
            with counter.get_lock():
                batch = counter.value
                counter.value += 1
            if batch >= len(batches) - 1:
                break
            self._batch(batches[batch], batches[batch + 1])
        self._finish_shard()
        self._extents.close()
        self._parent.send(Finished(self._kept_out))

    def _batch(self, start: int, end: int) -> None:
        order, files = self._task.order, self._task.files
        done = source_bytes = 0
        for index in range(start, end):
            number = files[order[index]]
            record = self._listing.record(number)
            path = self._listing.path(record)
            try:
                source_bytes += self._file(number, record, path)
            except (OSError, ChangedError) as error:
                if isinstance(error, OSError) and error.errno in _OUR_TROUBLE:
                    raise
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._parent.send(Unreadable(number, path, reason))
            done += 1
            if done == _REPORT_FILES:
                self._parent.send(BatchDone(done, source_bytes))
                done = source_bytes = 0
        self._parent.send(BatchDone(done, source_bytes))

    def _file(self, number: int, record: Record, path: bytes) -> int:
        """Store one file, whatever it takes; return its size."""
        for _ in range(READ_TRIES):
            descriptor = self._opener.open(path)
            try:
                before = os.fstat(descriptor)
                if not stat.S_ISREG(before.st_mode):
                    raise OSError(errno.EINVAL, "is no longer a regular file")
                sparse = before.st_blocks * 512 < before.st_size and _has_hole(descriptor, before.st_size)
                if before.st_size > CHUNK_BYTES or sparse:
                    blocks = before.st_blocks if sparse else -(-before.st_size // 512)
                    result = self._large(descriptor, before.st_size, blocks)
                else:
                    result = self._small(descriptor, before.st_size)
                if result is None or _state(os.fstat(descriptor)) != _state(before):
                    continue
                kept_out_here = kept_out(descriptor)
            finally:
                os.close(descriptor)
            self._kept_out.update(kept_out_here)
            fresh = file_entry(before, record.entry.name_bytes)
            if fresh[:6] != record.entry[:6]:
                self._listing.write_attributes(number, fresh)
            self._listing.write_result(number, record, result)
            return before.st_size
        raise ChangedError("kept changing while it was read")

    def _small(self, descriptor: int, size: int) -> Result | None:
        """Store a file as one entry; None if it did not have the size that fstat told."""
        if not size:
            # No bytes, no place; but a file that grew meanwhile is read again.
            return Result(RAW, 0, 0, 0, 0, 0, _HASH_OF_NOTHING) if not os.read(descriptor, 1) else None
        shard, room = self._reserve(size + 1)
        count = os.readv(descriptor, (room,))
        while 0 < count < size:  # a network file system may answer in parts
            more = os.readv(descriptor, (room[count:],))
            if not more:
                break
            count += more
        if count != size:
            return None
        digest = content_hash(room[:size])
        codec, dictionary, position, length, crc = self._keep(shard, room[:size], True)
        return Result(codec, dictionary, 0, position, self._shard_number | length << 32, crc, digest)

    def _large(self, descriptor: int, size: int, blocks: int) -> Result | None:
        """Store a file chunk by chunk; chunks that lie in a hole take no place."""
        start = self._extents.tell()
        digest = ContentHash()
        count = 0
        compress = self._probe(descriptor, size)
        next_data = 0
        for chunk, offset in enumerate(range(0, size, CHUNK_BYTES)):
            length = min(CHUNK_BYTES, size - offset)
            if next_data < offset + length:
                next_data = max(next_data, _next_data(descriptor, offset, size))
            if next_data >= offset + length:
                digest.update(_ZEROS[:length])
                continue
            shard, room = self._reserve(length)
            if os.preadv(descriptor, (room,), offset) != length:
                return None
            digest.update(room)
            codec, dictionary, position, stored_bytes, crc = self._keep(shard, room, compress)
            row = EXTENT.pack(chunk, position, self._shard_number, stored_bytes, crc, codec, dictionary)
            self._extents.write(row)
            count += 1
            if count % 64 == 0:
                self._parent.send(BatchDone(0, 0))  # a sign of life during a long file
        return Result(RAW, 0, EXTENTS, start, blocks, self._worker << 32 | count, digest.digest())

    def _probe(self, descriptor: int, size: int) -> bool:
        """Is it worth trying to compress the chunks of this file?"""
        if self._compressor is None or is_compressed(os.pread(descriptor, 16, 0)):
            return False
        sample = os.pread(descriptor, _PROBE_BYTES, max(0, size // 2 - _PROBE_BYTES // 2))
        return self._compressor.compress(sample)[0] != RAW

    def _reserve(self, size: int) -> tuple[ShardWriter, memoryview]:
        """Room for `size` bytes in the open shard, which is closed first when it is full."""
        if self._shard is not None and self._shard.entry_bytes >= SHARD_BYTES_TARGET:
            self._finish_shard()
        if self._shard is None:
            self._shard = ShardWriter(self._task.scratch / f"shard-{self._worker}-{self._shard_count}")
        return self._shard, self._shard.reserve(size)

    def _keep(self, shard: ShardWriter, data: memoryview, compress: bool) -> tuple[int, int, int, int, int]:
        """Make the bytes in the reserved room an entry: (codec, dictionary, position, stored length, CRC32C)."""
        codec, length = RAW, len(data)
        if compress and self._compressor is not None and not is_compressed(data[:16].tobytes()):
            codec, stored = self._compressor.compress(data)
            if codec != RAW:
                length = len(stored)
                data[:length] = stored
        crc = checksum(data[:length])
        ordinal, delta = shard.commit(length)
        return codec, self._dictionary if codec != RAW else 0, ordinal << 32 | delta, length, crc

    @property
    def _shard_number(self) -> int:
        """The open shard's number before `build` numbers the shards of all workers."""
        return self._worker * SHARDS_MAX + self._shard_count

    def _finish_shard(self) -> None:
        if self._shard is None:
            return
        done = self._shard.finish()
        self._parent.send(
            ShardDone(self._shard_number, done.path, done.hash, done.file_bytes, array("Q", done.payload_offsets))
        )
        self._shard = None
        self._shard_count += 1


def _keep_memory(libc: ctypes.CDLL) -> None:
    """Let malloc keep what it frees: LMDB's dirty pages (1 MB each) would go back to the kernel and be faulted in
    again for every segment, a fifth of the time of a copying pack."""
    with contextlib.suppress(AttributeError):  # not glibc
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_HASH_OF_NOTHING = content_hash(b"")
_ZEROS = memoryview(bytes(CHUNK_BYTES))


def _state(status: os.stat_result) -> tuple[int, int, int]:
    """What a write to the file would change."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _has_hole(descriptor: int, size: int) -> bool:
    """Fewer blocks than bytes may also be compression below us: ask the file system."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    except OSError:
        return False


def _next_data(descriptor: int, offset: int, size: int) -> int:
    """The first offset from `offset` on that holds data; `size` if the rest is a hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset
