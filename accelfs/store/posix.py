"""How does a directory of a POSIX file system serve as a store?

An object is a file.  It becomes visible by link(2) from a temporary name in the same directory, after its
bytes are on disk, and the directory is made durable before the call returns: a power loss leaves an object
whole or absent.  link(2) fails with EEXIST where rename(2) would replace, so create-if-absent holds for
several writers, on NFS too.

Concurrency: sync, stateless; any number of processes.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from accelfs.errors import FullError, NotFoundError, StoreError

_TEMPORARY = ".tmp-"


class PosixStore:
    """A store in the directory `root`, which is made at the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self.root / prefix) as found:
                return sorted(
                    entry.name
                    for entry in found
                    if entry.is_file(follow_symlinks=False) and not entry.name.startswith(_TEMPORARY)
                )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _translated(error, self.root / prefix) from error

    def read(self, key: str, bytes_max: int) -> bytes:
        path = self.root / key
        try:
            with path.open("rb") as file:
                data = file.read(bytes_max + 1)
        except OSError as error:
            raise _translated(error, path) from error
        if len(data) > bytes_max:
            raise StoreError(f"{path}: larger than the {bytes_max} bytes that may be read")
        return data

    def upload(self, source: Path, key: str) -> None:
        path = self.root / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, path)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
                self._copy(source, path)
            source.unlink()
            _sync_directory(path.parent)
        except OSError as error:
            raise _translated(error, path) from error

    def create(self, key: str, data: bytes) -> bool:
        path = self.root / key
        temporary = _temporary(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(path.parent)
        except OSError as error:
            raise _translated(error, path) from error
        return True

    def delete(self, key: str) -> None:
        path = self.root / key
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _translated(error, path) from error

    def local_path(self, key: str) -> Path:
        return self.root / key

    def _copy(self, source: Path, path: Path) -> None:
        """For scratch on another file system: copy under a temporary name, then link."""
        temporary = _temporary(path)
        try:
            with source.open("rb") as reader, temporary.open("xb") as writer:
                shutil.copyfileobj(reader, writer, 1 << 20)
                writer.flush()
                os.fsync(writer.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return
        finally:
            temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A name beside `path` that nobody else has: what a killed writer left may be a link to a published object."""
    return path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"


def _sync_directory(path: Path) -> None:
    """Make new names in this directory and the directory itself durable."""
    for directory in (path, path.parent):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _translated(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(f"{path}: no such object in the store")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"{path}: no space left; free some and run the command again")
    return StoreError(f"{path}: {error.strerror}")
