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
        extraction.write(tree.walk(path), os.fsencode(destination))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(f"{destination}: no space left on the device") from error
        raise StoreError(f"{error.filename or destination}: {error.strerror}") from error
    return Extracted(extraction.names, extraction.data_bytes)


class _Extraction:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._links: dict[int, bytes] = {}
        self._may_chown = os.geteuid() == 0
        self.names = 0
        self.data_bytes = 0

    def write(self, attributes: Attributes, path: bytes) -> None:
        """Write one node and all below it; directories get their mode and time last."""
        pending: list[tuple[Attributes, bytes, bool]] = [(attributes, path, False)]
        while pending:
            found, where, listed = pending.pop()
            if listed:
                self._finish(found, where)
                continue
            self.names += 1
            if stat.S_ISDIR(found.mode):
                os.mkdir(where, 0o700)
                pending.append((found, where, True))
                for child in self._tree.list(found.node):
                    if b"/" in child.name or child.name in (b"", b".", b".."):
                        raise DamagedError(f"the catalog holds a name that is none: {child.name!r}")
                    pending.append((child.attributes, where + b"/" + child.name, False))
            elif found.nlink > 1 and found.node in self._links:
                os.link(self._links[found.node], where, follow_symlinks=False)
            else:
                if stat.S_ISLNK(found.mode):
                    os.symlink(self._tree.readlink(found.node), where)
                else:
                    self._file(found, where)
                self._finish(found, where)
                if found.nlink > 1:
                    self._links[found.node] = where

    def _file(self, found: Attributes, where: bytes) -> None:
        descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            sparse = found.blocks * 512 < found.size
            for offset in range(0, found.size, CHUNK_BYTES):
                data = self._tree.read(found.node, offset, CHUNK_BYTES)
                if not (sparse and not any(data)):
                    os.pwrite(descriptor, data, offset)
            os.truncate(descriptor, found.size)
        finally:
            os.close(descriptor)
        self.data_bytes += found.size

    def _finish(self, found: Attributes, where: bytes) -> None:
        if self._may_chown:
            os.chown(where, found.uid, found.gid, follow_symlinks=False)
        if not stat.S_ISLNK(found.mode):
            os.chmod(where, stat.S_IMODE(found.mode))
        os.utime(where, ns=(found.mtime_ns, found.mtime_ns), follow_symlinks=False)
