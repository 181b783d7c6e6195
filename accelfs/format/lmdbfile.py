"""How is an LMDB file of ours opened, pinned to one file format, and its failures named?

py-lmdb 3 ships two engines whose files are mutually unreadable.  `lib_version=0` is the 0.9 engine;
its data file (MDB_DATA_VERSION 1, pages of 4096 bytes) is what "lmdb-0.9" means in a manifest.  A file
never has a lock file: it has one writer while it is made and is immutable afterwards.

Concurrency: sync.  An environment must be opened after a fork, never carried across one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from accelfs.errors import AccelfsError, DamagedError, FullError, StoreError, UnknownVersionError

ENGINE = "lmdb-0.9"
PAGE_BYTES = 4096
COMMIT_BYTES = 8 << 20
"""A transaction holds its dirty pages in anonymous memory, so writers commit this often."""

# lmdb 0.9 mdb.c: MDB_page (pgno u64, pad u16, flags u16, pages u32 of an overflow page), then MDB_meta
# (magic u32, version u32).
PAGE_HEADER = struct.Struct("<QHHI")
P_OVERFLOW = 0x04
P_META = 0x08
_META = struct.Struct("<QHHIII")
_MDB_MAGIC = 0xBEEFC0DE
_MDB_DATA_VERSION = 1
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
HEAD_BYTES = PAGE_BYTES + _META.size


def create(path: Path, map_bytes: int, databases_max: int) -> lmdb.Environment:
    """Create a new file for one writer; durability is the writer's own fsync at its end."""
    return lmdb.open(
        str(path), subdir=False, lock=False, sync=False, metasync=False, meminit=False,
        map_size=map_bytes, max_dbs=databases_max, lib_version=0,
    )  # fmt: skip


def open_immutable(path: Path, databases_max: int) -> lmdb.Environment:
    """Open a finished file for reading.  Raise StoreError or FormatError."""
    try:
        with path.open("rb") as file:
            check_head(file.read(HEAD_BYTES), path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    with translated(path):
        return lmdb.open(
            str(path), subdir=False, lock=False, readonly=True, create=False, readahead=False,
            max_dbs=databases_max, lib_version=0,
        )  # fmt: skip


def check_head(head: bytes, path: Path) -> None:
    """Refuse a file whose first two pages (LMDB's meta pages) are not of the pinned format."""
    if len(head) < HEAD_BYTES:
        raise DamagedError(f"{path}: too short to be an LMDB file")
    for start in (0, PAGE_BYTES):
        _, _, flags, _, magic, version = _META.unpack_from(head, start)
        if magic != _MDB_MAGIC or flags & P_META == 0:
            raise DamagedError(f"{path}: not an LMDB file")
        if version != _MDB_DATA_VERSION:
            raise UnknownVersionError(f"{path}: LMDB data version {version}; this release reads {_MDB_DATA_VERSION}")


def start_writeback(path: Path) -> None:
    """Ask the kernel to begin writing the file's dirty pages, without waiting (sync_file_range(2)).

    Called at each commit it lets the disk work while entries are still being read and compressed; the fsync at the
    end then finds little left to do.
    """
    libc = ctypes.CDLL(None)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc.sync_file_range(
            descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )  # best effort: where it fails, fsync does the work
    finally:
        os.close(descriptor)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn lmdb's exceptions into the error tree."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise translation(error, path) from error


def translation(error: lmdb.Error | OSError, path: Path) -> AccelfsError:
    """The error of the tree that one of lmdb's, or of the system's, stands for."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return FullError(f"{path}: no space left on the device")
        return StoreError(f"{path}: {error.strerror}")
    if isinstance(error, lmdb.MapFullError):
        return FullError(f"{path}: the file is larger than was planned for: {error}")
    if "No space left" in str(error):
        return FullError(f"{path}: no space left on the device")
    return DamagedError(f"{path}: {error}")
