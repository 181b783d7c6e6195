"""Which names, attributes and bytes does a source hold?

A source is a directory: a path or `file://` URL.  The walk visits every name once and never follows a
symbolic link; files are opened relative to the root's descriptor, so that a tree deeper than PATH_MAX is
read like any other.

Concurrency: sync.  The walk runs in the packing process, `open_file` in the workers.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from accelfs.errors import SourceError, UsageError
from accelfs.format.catalog import LINK, NAME_BYTES_MAX, Entry
from accelfs.store.filesystem import ACCELFS_TYPE, mount_table

if TYPE_CHECKING:
    from accelfs.pack.listing import ListingWriter
    from accelfs.pack.report import Kind, Report

_OPEN_FOLDERS_MAX = 256
_FINGERPRINT = struct.Struct("<QqIIII")
_NO_HASH = bytes(16)
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Walked(NamedTuple):
    """What a walk tells beside its listing: a fingerprint of the names and attributes, and what is not kept."""

    fingerprint: str
    kept_out: Counter[Kind]


def local_root(source: str) -> Path:
    """The directory that a path or `file://` URL names; UsageError or SourceError says what is wrong with it."""
    if not source or "\0" in source:
        raise UsageError("the source is empty: name the folder to be packed")
    path = _url_path(source) if "://" in source else Path(source)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise SourceError(f"{source}: no such folder") from None
    except OSError as error:
        raise SourceError(f"{source}: {error.strerror}") from error
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{source}: is a symbolic link; name the folder itself: {os.path.realpath(path)}")
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{source}: is not a folder; name the folder that holds it")
    if status.st_dev in _accelfs_devices():
        raise UsageError(f"{source}: lies inside a mount of accelfs; pack the source that it was made from")
    return Path(os.path.abspath(path))


def _url_path(source: str) -> Path:
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise UsageError(f"{source}: not a URL: {error}") from None
    if parts.scheme != "file":
        raise UsageError(f"{source}: sources of type {parts.scheme}:// cannot be packed; use a local path or file://")
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{source}: a file:// URL must name a path of this machine, as in file:///data/photos")
    if "?" in source or "#" in source:
        raise UsageError(f"{source}: a file:// URL has no query or fragment; write %3F for ? and %23 for # in names")
    path = unquote_to_bytes(parts.path)
    if b"\0" in path:
        raise UsageError(f"{source}: %00 cannot stand in a path")
    return Path(os.fsdecode(path))


def walk(
    root: Path, listing: ListingWriter, report: Report, *, skip_unreadable: bool, on_names: Callable[[int], None]
) -> Walked:
    """List the whole tree into `listing`.

    `on_names` hears of the count now and then.  A directory that cannot be read raises SourceError, or is
    kept empty and reported when `skip_unreadable`.
    """
    found = _Walk(root, listing, report, skip_unreadable, on_names)
    return Walked(found.run(), found.kept_out)


def open_directory(root: int, path: bytes) -> int:
    """Open a folder below the root's descriptor, however deep, and never through a symbolic link.

    The tree may change while it is packed: a folder that was replaced by a link must not lead out of the source.
    """
    directory = os.dup(root)
    for name in path.split(b"/") if path else ():
        try:
            step = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        finally:
            os.close(directory)
        directory = step
    return directory


class Opener:
    """Open files of a source for reading; keeps the descriptors of the folders that were used last."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._folders: dict[bytes, int] = {}

    def open(self, path: bytes) -> int:
        """A descriptor of the file: never through a symbolic link, never waiting for a FIFO's other end."""
        folder, _, name = path.rpartition(b"/")
        directory = self._folders.get(folder)
        if directory is None:
            directory = open_directory(self._root, folder)
            if len(self._folders) >= _OPEN_FOLDERS_MAX:
                os.close(self._folders.pop(next(iter(self._folders))))
            self._folders[folder] = directory
        return os.open(name, _OPEN_FILE, dir_fd=directory)

    def close(self) -> None:
        while self._folders:
            os.close(self._folders.popitem()[1])


def file_entry(status: os.stat_result, name_bytes: int) -> Entry:
    """The entry of a name as the listing holds it before its bytes have a place."""
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    return Entry(
        status.st_size, seconds, nanoseconds, status.st_mode, status.st_uid, status.st_gid, 1, 0, 0, name_bytes, 0,
        0, 0, 0, _NO_HASH,
    )  # fmt: skip


def kept_out(descriptor: int) -> list[Kind]:
    """What an open file or folder has that a version does not keep."""
    try:
        names = os.listxattr(descriptor)
    except OSError:
        return []  # the file system has none
    kinds: list[Kind] = []
    for name in names:
        if name.startswith("system.posix_acl_"):
            kinds.append("acls")
        elif name == "security.capability":
            kinds.append("capabilities")
        elif name != "security.selinux":
            kinds.append("xattrs")
    return kinds


class _Walk:
    """Breadth first over the directories; all state of one walk."""

    def __init__(
        self, root: Path, listing: ListingWriter, report: Report, skip_unreadable: bool, on_names: Callable[[int], None]
    ) -> None:
        self._root = root
        self._listing = listing
        self._report = report
        self._skip_unreadable = skip_unreadable
        self._on_names = on_names
        self._first_links: dict[tuple[int, int], int] = {}
        self._fingerprint = hashlib.sha256()
        self._forbidden_devices = _accelfs_devices()
        self._queue: deque[tuple[int, bytes]] = deque()
        self.kept_out: Counter[Kind] = Counter()

    def run(self) -> str:
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(root)
            self._device = status.st_dev
            self._listing.add(file_entry(status, 0), 1, b"", b"", status.st_ino, status.st_dev)
            self._note(b"", status)
            self._queue.append((1, b""))
            while self._queue:
                number, path = self._queue.popleft()
                self._directory(root, number, path)
                self._on_names(self._listing.count)
        finally:
            os.close(root)
        return self._fingerprint.hexdigest()

    def _directory(self, root: int, number: int, path: bytes) -> None:
        """Append the children of one directory.  Names are sorted first and looked at one by one, so that a
        directory of millions costs no more memory than its names."""
        first_child = self._listing.count + 1
        subdirectories = count = 0
        try:
            directory = open_directory(root, path)
        except OSError as error:
            self._unreadable(path, error)
        else:
            try:
                self.kept_out.update(kept_out(directory))
                for name in self._names(directory, path):
                    kind = self._child(directory, number, path, name)
                    count += kind != 0
                    subdirectories += kind == stat.S_IFDIR
            finally:
                os.close(directory)
        self._listing.directories.extend((number, first_child, count, subdirectories))

    def _names(self, directory: int, path: bytes) -> list[bytes]:
        try:
            return sorted(map(os.fsencode, os.listdir(directory)))
        except OSError as error:
            self._unreadable(path, error)
            return []

    def _child(self, directory: int, parent: int, folder: bytes, name: bytes) -> int:
        """Append one child; return its type, or 0 when it is left out and reported."""
        path = folder + b"/" + name if folder else name
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            target = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(status.st_mode) else b""
        except OSError as error:
            self._unreadable(path, error)
            return 0
        return stat.S_IFMT(status.st_mode) if self._add(parent, path, name, status, target) else 0

    def _add(self, parent: int, path: bytes, name: bytes, status: os.stat_result, target: bytes) -> bool:
        """False if the name is of a kind that is not packed."""
        mode = status.st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            self._report.name("fifo" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device", path)
            return False
        if status.st_dev != self._device and status.st_dev in self._forbidden_devices:
            raise SourceError(
                f"{os.fsdecode(path)}: a mount of accelfs lies inside the source; unmount it or pack another folder"
            )
        assert 0 < len(name) <= NAME_BYTES_MAX, "the kernel gives no other names"
        entry = file_entry(status, len(name))
        if stat.S_ISLNK(mode):
            entry = entry._replace(size=len(target))
        if status.st_nlink > 1 and not stat.S_ISDIR(mode):
            node = self._first_links.setdefault((status.st_dev, status.st_ino), self._listing.count + 1)
            if node != self._listing.count + 1:
                entry = entry._replace(flags=LINK, position=node)
                self._listing.further_links[node] += 1
        number = self._listing.add(entry, parent, name, target, status.st_ino, status.st_dev)
        self._note(name, status)
        if stat.S_ISDIR(mode):
            self._queue.append((number, path))
        elif stat.S_ISREG(mode) and not entry.flags & LINK:
            self._listing.files.append(number)
            self._listing.sizes.append(status.st_size)
        return True

    def _note(self, name: bytes, status: os.stat_result) -> None:
        seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        self._fingerprint.update(
            name + b"\0" + _FINGERPRINT.pack(size, seconds, nanoseconds, status.st_mode, status.st_uid, status.st_gid)
        )

    def _unreadable(self, path: bytes, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) or not self._skip_unreadable:
            raise SourceError(
                f"{os.fsdecode(os.path.join(os.fsencode(self._root), path))}: {error.strerror}; nothing was published "
                "(--skip-unreadable leaves such names out and reports them)"
            ) from error
        self._report.name("unreadable", path, error.strerror or str(error))


def _accelfs_devices() -> frozenset[int]:
    """Device numbers of the accelfs mounts of this node."""
    devices = set()
    for row in mount_table():
        if row.type == ACCELFS_TYPE:
            major, minor = row.device.split(":")
            devices.add(os.makedev(int(major), int(minor)))
    return frozenset(devices)
