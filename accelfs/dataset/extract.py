"""How is a tree, or a part of it, written back as ordinary files?

The way out without a mount: names, bytes, holes, modes, times, symbolic and hard links; owners where we may set them.
The destination must not exist: nothing is overwritten.

Concurrency: sync.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelfs.errors import DamagedError, FullError, StoreError, UsageError
from accelfs.format.codec import CHUNK_BYTES

if TYPE_CHECKING:
    from accelfs.dataset.tree import Attributes, Tree


_ZEROS = memoryview(bytes(CHUNK_BYTES))
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Extracted:
    """What was written."""

    names: int
    data_bytes: int


def extract(tree: Tree, path: bytes, destination: Path) -> Extracted:
    """Write what lies at `path` of the tree to `destination`.

    Raises UsageError if the destination exists, FullError or StoreError if it cannot be written, and what reading
    raises; what was written until then stays, for a look.
    """
    if os.path.lexists(destination):
        raise UsageError(f"{destination}: exists already; extract to a new name")
    if not destination.parent.is_dir():
        raise UsageError(f"{destination.parent}: no such folder; make it first")
    extraction = _Extraction(tree)
    try:
        folder = os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            extraction.write(tree.walk(path), folder, os.fsencode(destination.name))
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(f"{destination}: no space left on the device") from error
        name = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        raise StoreError(f"{destination}{name}: {error.strerror}") from error
    return Extracted(extraction.names, extraction.data_bytes)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A name that is still to be written, or a directory that is to be finished: `opened` is its descriptor then."""

    found: Attributes
    folder: int
    path: tuple[bytes, ...]
    opened: int = -1


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """All of it: a disk that gets full takes a part first, and only then refuses."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


class _Extraction:
    """Writes names relative to the descriptor of their folder, so that a tree may be deeper than PATH_MAX.

    One descriptor a level is open at a time.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._first_names: dict[int, tuple[bytes, ...]] = {}
        """Where each node that has several names was written first."""
        self._may_chown = os.geteuid() == 0
        self.names = 0
        self.data_bytes = 0

    def write(self, found: Attributes, top: int, name: bytes) -> None:
        """Write one node and all below it; a directory gets its mode and time when all below it is written."""
        pending = [_Pending(found, top, (name,))]
        try:
            while pending:
                work = pending.pop()
                if work.opened >= 0:
                    os.close(work.opened)
                    self._finish(work.found, work.folder, work.path[-1])
                    continue
                self.names += 1
                if stat.S_ISDIR(work.found.mode):
                    pending += self._directory(work)
                elif work.found.node in self._first_names:
                    self._link(work, top)
                else:
                    self._leaf(work)
        finally:
            for work in pending:
                if work.opened >= 0:
                    os.close(work.opened)

    def _directory(self, work: _Pending) -> list[_Pending]:
        """Make the folder; return its own end, to be done last, and its children."""
        name = work.path[-1]
        os.mkdir(name, 0o700, dir_fd=work.folder)
        opened = os.open(name, _OPEN_FOLDER, dir_fd=work.folder)
        children = [_Pending(work.found, work.folder, work.path, opened)]
        for child in self._tree.list(work.found.node):
            if b"/" in child.name or child.name in (b"", b".", b".."):
                raise DamagedError(f"the catalog holds a name that is none: {child.name!r}")
            children.append(_Pending(child.attributes, opened, (*work.path, child.name)))
        return children

    def _link(self, work: _Pending, top: int) -> None:
        *folders, first = self._first_names[work.found.node]
        folder = os.dup(top)
        try:
            for name in folders:
                step = os.open(name, _OPEN_FOLDER, dir_fd=folder)
                os.close(folder)
                folder = step
            os.link(first, work.path[-1], src_dir_fd=folder, dst_dir_fd=work.folder, follow_symlinks=False)
        finally:
            os.close(folder)

    def _leaf(self, work: _Pending) -> None:
        found, folder, name = work.found, work.folder, work.path[-1]
        if stat.S_ISLNK(found.mode):
            os.symlink(self._tree.readlink(found.node), name, dir_fd=folder)
        else:
            self._file(found, folder, name)
        self._finish(found, folder, name)
        if found.nlink > 1:
            self._first_names[found.node] = work.path

    def _file(self, found: Attributes, folder: int, name: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            sparse = found.blocks * 512 < found.size
            for offset in range(0, found.size, CHUNK_BYTES):
                data = self._tree.read(found.node, offset, CHUNK_BYTES)
                if not (sparse and data == _ZEROS[: len(data)]):
                    _write(descriptor, data, offset)
            os.truncate(descriptor, found.size)
        finally:
            os.close(descriptor)
        self.data_bytes += found.size

    def _finish(self, found: Attributes, folder: int, name: bytes) -> None:
        if self._may_chown:
            os.chown(name, found.uid, found.gid, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISLNK(found.mode):
            os.chmod(name, stat.S_IMODE(found.mode), dir_fd=folder)
        os.utime(name, ns=(found.mtime_ns, found.mtime_ns), dir_fd=folder, follow_symlinks=False)
