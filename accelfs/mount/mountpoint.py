"""May we mount at this path, and how is a mount taken down?

After a crash the path must answer an error, never show an empty folder: so nothing here unmounts what is served,
except on request, and a stale mount of ours (ENOTCONN) is only replaced by a new one.

The mount table is read instead of the path wherever a mount could hang who touches it.

Concurrency: sync, stateless.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
from pathlib import Path

from accelfs.errors import BusyError, MountError, UsageError
from accelfs.store.filesystem import ACCELFS_TYPE, mounted_at

_MNT_DETACH = 2
_UNMOUNT_SECONDS = 10.0
_MAKE_TRIES = 10


def resolved(path: Path) -> Path:
    """The path as the mount table shows it: absolute, without symbolic links.

    The last component is looked at only if nothing is mounted there.
    """
    path = Path(os.path.abspath(path))
    path = Path(os.path.realpath(path.parent)) / path.name
    return path if mounted_at(path) is not None else Path(os.path.realpath(path))


def prepare(path: Path, *, create: bool) -> int:
    """Make sure that a mount can be made here; return how many folders were made for it, parents included.

    Takes down a stale mount of ours.  Raises UsageError or MountError with what to do.
    """
    _remove_stale(path)
    row = mounted_at(path)
    if row is not None:
        raise MountError(
            f"{path}: {row.source} ({row.type}) is mounted here already; unmount it or name another folder"
        )
    made = 0
    try:
        if create:
            made = _make_folders(path)
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{path}: is not a folder; a mount needs an empty folder")
        if any(os.scandir(path)):
            raise UsageError(f"{path}: is not empty, and a mount would hide what it holds; name an empty folder")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such folder; make it first: mkdir -p {path}") from None
    except OSError as error:
        raise MountError(f"{path}: {error.strerror}") from error
    return made


def remove_folders(path: Path, made: int) -> None:
    """Remove the folders that `prepare` made, from the last one up; somebody may have put something there since."""
    try:
        for folder in (path, *path.parents)[:made]:
            folder.rmdir()
    except OSError:
        return


def _make_folders(path: Path) -> int:
    """Make the missing folders of a path; another mount may make or remove the same ones at the same time."""
    made = 0
    for _ in range(_MAKE_TRIES):
        try:
            path.mkdir()
            return made + 1
        except FileExistsError:
            return made
        except FileNotFoundError:
            made = _make_folders(path.parent)
    raise MountError(f"{path}: cannot be made: {path.parent} is removed again and again")


def unmount(path: Path, *, lazy: bool) -> None:
    """Take down the mount at this path.  BusyError if it is in use and not `lazy`."""
    if os.geteuid() == 0:
        _umount2(path, lazy)
        return
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_UNMOUNT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MountError(f"{path}: cannot be unmounted: {error}") from error
    if done.returncode != 0:
        text = done.stderr.strip()
        if "busy" in text:
            raise BusyError(_busy(path))
        raise MountError(f"{path}: cannot be unmounted: {text}")


def _umount2(path: Path, lazy: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), _MNT_DETACH if lazy else 0) == 0:
        return
    number = ctypes.get_errno()
    if number == errno.EBUSY:
        raise BusyError(_busy(path))
    raise MountError(f"{path}: cannot be unmounted: {os.strerror(number)}")


def _busy(path: Path) -> str:
    return (
        f"{path}: is in use; end the programs that use it (fuser -vm {path} lists them), or detach it with --force: "
        "open files stay readable, the path is gone at once"
    )


def _remove_stale(path: Path) -> None:
    """A mount of ours whose daemon is gone answers ENOTCONN to everything; a few may lie on top of each other."""
    for _ in range(16):
        row = mounted_at(path)
        if row is None or row.type != ACCELFS_TYPE:
            return
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise MountError(f"{path}: {error.strerror}") from error
            unmount(path, lazy=True)
        else:
            return
