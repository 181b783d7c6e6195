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
from typing import NamedTuple

import lmdb

from accelfs.errors import AccelfsError, DamagedError, FullError, StoreError, UnknownVersionError

ENGINE = "lmdb-0.9"
PAGE_BYTES = 4096
COMMIT_BYTES = 8 << 20
"""A transaction holds its dirty pages in anonymous memory, so writers commit this often."""

# lmdb 0.9 mdb.c: MDB_page is pgno u64, pad u16, flags u16, then pages u32 (overflow) or lower and upper u16 (tree).
PAGE_HEADER = struct.Struct("<QHHI")
P_BRANCH = 0x01
P_LEAF = 0x02
P_OVERFLOW = 0x04
P_META = 0x08
F_BIGDATA = 0x01
# MDB_node: low and high half of the data size (of a branch: of the page), flags, key bytes; the key follows.
_NODE = struct.Struct("<HHHH")
_POINTER = struct.Struct("<H")
# MDB_meta behind the page header: magic, version; then address, map size, of the free database the page size, of the
# main database its flags and root, last page, transaction.
_META_HEAD = struct.Struct("<QHHIII")
_META = struct.Struct("<QQI48xH34xQQQ")
_NO_PAGE = 2**64 - 1
_MDB_MAGIC = 0xBEEFC0DE
_MDB_DATA_VERSION = 1
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
HEAD_BYTES = PAGE_BYTES + _META_HEAD.size + _META.size


def create(path: Path, map_bytes: int, databases_max: int) -> lmdb.Environment:
    """Create a new file for one writer; durability is the writer's own fsync at its end.

    `meminit`: the unused ends of pages are zeroed, so that nothing of the writer's memory gets into a file that others
    read, and equal contents give equal files.
    """
    return lmdb.open(
        str(path), subdir=False, lock=False, sync=False, metasync=False, meminit=True,
        map_size=map_bytes, max_dbs=databases_max, lib_version=0,
    )  # fmt: skip


def open_immutable(path: Path, databases_max: int) -> lmdb.Environment:
    """Open a finished file for reading.  Raise StoreError or FormatError.

    LMDB walks a file's pages without checking them, so what is opened must have been hashed before, or walked by
    `check_pages`.
    """
    try:
        with path.open("rb") as file:
            check_head(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    with translated(path):
        return lmdb.open(
            str(path), subdir=False, lock=False, readonly=True, create=False, readahead=False,
            max_dbs=databases_max, lib_version=0,
        )  # fmt: skip


class _Meta(NamedTuple):
    """The part of MDB_meta that we look at."""

    address: int
    map_bytes: int
    page_bytes: int
    flags: int
    root: int
    last_page: int
    transaction: int


def check_head(head: bytes, file_bytes: int, path: Path) -> None:
    """Refuse a file whose meta pages are not of the pinned format, or that ends before its last page."""
    _newest(head, file_bytes, path)


def check_pages(view: memoryview, path: Path) -> None:
    """Walk the tree of the main database and refuse any pointer that leaves its page or the file.

    After this LMDB can be let loose on bytes that nobody has hashed.  For files without named databases.
    """
    meta = _newest(bytes(view[:HEAD_BYTES]), len(view), path)
    if meta.flags:
        raise DamagedError(f"{path}: database flags {meta.flags:#x} where none are set")
    pages = len(view) // PAGE_BYTES
    seen = set()
    pending = [] if meta.root == _NO_PAGE else [meta.root]
    while pending:
        page = pending.pop()
        if not 2 <= page < pages or page in seen:
            raise DamagedError(f"{path}: page {page} does not belong to the tree")
        seen.add(page)
        pending += _check_page(bytes(view[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]), page, view, path)


def _check_page(data: bytes, page: int, view: memoryview, path: Path) -> list[int]:
    """Check one tree page; return the pages that a branch points to."""
    damaged = DamagedError(f"{path}: page {page} is damaged")
    number, _, flags, bounds = PAGE_HEADER.unpack_from(data)
    lower, upper = bounds & 0xFFFF, bounds >> 16
    if number != page or flags not in (P_BRANCH, P_LEAF) or lower % 2:
        raise damaged
    if not PAGE_HEADER.size < lower <= upper <= PAGE_BYTES:
        raise damaged
    children = []
    for (at,) in _POINTER.iter_unpack(data[PAGE_HEADER.size : lower]):
        if at % 2 or not upper <= at <= PAGE_BYTES - _NODE.size:
            raise damaged
        low, high, node_flags, key_bytes = _NODE.unpack_from(data, at)
        end = at + _NODE.size + key_bytes
        if flags == P_BRANCH:
            children.append(low | high << 16 | node_flags << 32)
        elif node_flags == F_BIGDATA:
            if end + 8 > PAGE_BYTES:
                raise damaged
            _check_overflow(view, int.from_bytes(data[end : end + 8], "little"), low | high << 16, path)
        elif node_flags:
            raise damaged
        else:
            end += low | high << 16
        if end > PAGE_BYTES:
            raise damaged
    return children


def _check_overflow(view: memoryview, page: int, value_bytes: int, path: Path) -> None:
    needed = -(-(PAGE_HEADER.size + value_bytes) // PAGE_BYTES)
    if not 2 <= page <= len(view) // PAGE_BYTES - needed:
        raise DamagedError(f"{path}: a value of {value_bytes} bytes at page {page} leaves the file")
    number, _, flags, pages = PAGE_HEADER.unpack_from(view, page * PAGE_BYTES)
    if number != page or flags != P_OVERFLOW or pages != needed:
        raise DamagedError(f"{path}: page {page} is damaged")


def _newest(head: bytes, file_bytes: int, path: Path) -> _Meta:
    """The meta page of the last transaction, both checked."""
    if len(head) < HEAD_BYTES:
        raise DamagedError(f"{path}: too short to be an LMDB file")
    metas = []
    for start in (0, PAGE_BYTES):
        _, _, flags, _, magic, version = _META_HEAD.unpack_from(head, start)
        if magic != _MDB_MAGIC or flags & P_META == 0:
            raise DamagedError(f"{path}: not an LMDB file")
        if version != _MDB_DATA_VERSION:
            raise UnknownVersionError(f"{path}: LMDB data version {version}; this release reads {_MDB_DATA_VERSION}")
        metas.append(_Meta._make(_META.unpack_from(head, start + _META_HEAD.size)))
    meta = max(metas, key=lambda meta: meta.transaction)
    if meta.address or meta.page_bytes != PAGE_BYTES:
        raise DamagedError(f"{path}: its meta page is damaged")
    if file_bytes % PAGE_BYTES or file_bytes < (meta.last_page + 1) * PAGE_BYTES:
        raise DamagedError(f"{path}: {file_bytes} bytes, where {meta.last_page + 1} pages were written: truncated")
    return meta


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
    # A write that finds no space is cut short, which LMDB reports as an input/output error.
    if "No space left" in str(error) or ("Input/output" in str(error) and _is_full(path)):
        return FullError(f"{path}: no space left on the device")
    return DamagedError(f"{path}: {error}")


def _is_full(path: Path) -> bool:
    """Has the file system no room for one more commit?"""
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < 2 * COMMIT_BYTES
