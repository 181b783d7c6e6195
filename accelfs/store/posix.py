"""How does a directory of a POSIX file system serve as a store?

An object is a file.  It is written without a name and gets its name by linkat(2) after its bytes are on disk, and the
directory is made durable before the call returns: a power loss leaves an object whole or absent.  A link fails with
EEXIST where rename(2) would replace, so create-if-absent holds for several writers, on NFS too.

Concurrency: sync, stateless; any number of processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
                    if entry.is_file(follow_symlinks=False) and not entry.name.startswith(".")
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _new_file(path.parent) as (file, name):
                file.write(data)
                if not _publish(file, name, path):
                    return False
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
        """For scratch on another file system."""
        with source.open("rb") as reader, _new_file(path.parent) as (writer, name):
            shutil.copyfileobj(reader, writer, 1 << 20)
            _publish(writer, name, path)


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[tuple[BinaryIO, str]]:
    """A new file, and the path by which it is linked to its name.

    Without a name (O_TMPFILE) where the file system can, so that nothing is left of a writer that is killed.
    """
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        temporary = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                yield file, str(temporary)
        finally:
            temporary.unlink(missing_ok=True)
    else:
        with os.fdopen(descriptor, "wb") as file:
            yield file, f"/proc/self/fd/{descriptor}"


def _publish(file: BinaryIO, source: str, path: Path) -> bool:
    """Make the file's bytes durable, then give it its name; False if the name is taken."""
    file.flush()
    os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Given a folder's descriptor, Python calls linkat(2), which follows the link in /proc to the file.
        os.link(source, path.name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    finally:
        os.close(folder)
    return True


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
